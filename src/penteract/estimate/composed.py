"""The price of a rank put together from pieces, without a walk of its step, a thousand times faster.

The numbers are the walk's, but for what routing decides: there a sum of peaks, and the walk's peak is no larger.
`tests/estimate/test_composed.py` holds both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple, TypeVar

from penteract.estimate.holdings import Holder, Holding
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import EMBEDDING, ENDS, HEAD, Kind, Piece, Recorder, Sight, Wire, coded, sight, waiting
from penteract.estimate.pools import Pools
from penteract.estimate.price import away, bucket_workspace, fed, owned, ringed
from penteract.estimate.stages import Borders, Chain, StageSum, add_up, borders, shown
from penteract.model.decoder import homes, shared
from penteract.ops.params import Param
from penteract.ops.spec import Widths
from penteract.parallel.data import NONE, Alike, Bucket, Pack, Unit, bucket_of, packs
from penteract.parallel.pipeline import stage_layers
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.movers import PLAIN, Movers
from penteract.spec.precision import Policy, policy
from penteract.step import muon
from penteract.step.ring import PLACES, gathered_bytes, places, ring_sizes, summed_bytes
from penteract.units import Bytes, Flops

_Key = TypeVar("_Key")
Chains = tuple[Chain, ...]  # of a pipeline rank, one a chunk
_Cut = tuple[int, int, tuple[object, ...]]  # pp, vpp, and the edits where layers differ in them


@dataclass(frozen=True, slots=True)
class RankPrice:
    """What a pipeline rank holds. As `Price`: resident bytes, the arena, what is routed, one body's workspace."""

    resident: Mapping[str, Bytes]
    arena: Bytes
    routed: Bytes
    workspace: Bytes
    flops: Counter[str]
    seams: Counter[tuple[str, str]]  # collective, axis
    host: Bytes  # beside the device

    @property
    def allocated(self) -> Bytes:
        return sum(self.resident.values()) + self.arena + self.routed + self.workspace


@dataclass(frozen=True, slots=True)
class Deal:
    """Which chains the pipeline ranks have.

    alike    ranks that have the same, together
    group    of each rank, its place in `alike`
    """

    by_rank: tuple[Chains, ...]
    alike: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]

    @staticmethod
    def of(chains: Sequence[Chain], pp: int) -> Deal:
        """Stages are dealt round the ranks like cards."""
        by_rank = tuple(tuple(chains[r::pp]) for r in range(pp))
        alike: dict[Chains, list[int]] = {}
        for r, own in enumerate(by_rank):
            alike.setdefault(own, []).append(r)
        places = {own: i for i, own in enumerate(alike)}
        return Deal(by_rank, tuple(map(tuple, alike.values())), tuple(places[own] for own in by_rank))


class _Marks(NamedTuple):
    """Parameters of a piece whose gradients may wait, and those that are gathered as codes."""

    late: frozenset[str] = frozenset()
    coded: frozenset[str] = frozenset()


@dataclass(slots=True)
class Composer:
    """Prices ranks of layouts of one model. What two layouts show alike is recorded once."""

    model: ModelSpec
    sequence_length: int
    precision: str | Policy
    movers: Movers = PLAIN
    recorder: Recorder = field(init=False)
    holder: Holder = field(init=False)
    pieces: dict[tuple[str, Sight], Piece] = field(default_factory=dict[tuple[str, Sight], Piece])
    holdings: dict[tuple[str, Sight], Holding] = field(default_factory=dict[tuple[str, Sight], Holding])
    sums: dict[Sight, dict[Chain, StageSum]] = field(default_factory=dict[Sight, dict[Chain, StageSum]])
    borders: dict[tuple[Chain, Sight], Borders] = field(default_factory=dict[tuple[Chain, Sight], Borders])
    pooled: dict[tuple[Sight, Chains], Pools] = field(default_factory=dict[tuple[Sight, Chains], Pools])
    dealt: dict[_Cut, Deal] = field(default_factory=dict[_Cut, Deal])
    packed: dict[tuple[object, ...], tuple[Pack, ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[Pack, ...]]
    )
    counted: dict[tuple[object, ...], tuple[tuple[Pack, int], ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[tuple[Pack, int], ...]]
    )
    marked: dict[int, _Marks] = field(default_factory=dict[int, _Marks])  # by a piece's identity
    chains: dict[_Cut, tuple[Chain, ...]] = field(default_factory=dict[_Cut, tuple[Chain, ...]])

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.model, self.sequence_length, self.policy)
        self.holder = Holder(self.widths)

    @property
    def policy(self) -> Policy:
        return policy(self.precision)

    @property
    def widths(self) -> Widths:
        return self.policy.widths

    def piece(self, kind: Kind, layout: Layout, seen: Sight) -> Piece:
        key = (kind.name, self.recorder.sight_of(kind, layout, seen))
        if key not in self.pieces:
            self.pieces[key] = self.recorder.record(kind, layout)
        return self.pieces[key]

    def holding(self, kind: Kind, layout: Layout, seen: Sight) -> Holding:
        """What a pass through a piece takes."""
        key = (kind.name, self.recorder.sight_of(kind, layout, seen))
        if key not in self.holdings:
            load = Balanced.of(self.model, layout, self.sequence_length)
            self.holdings[key] = self.holder.measure(self.piece(kind, layout, seen), layout, load)
        return self.holdings[key]

    def stage_chains(self, layout: Layout) -> tuple[Chain, ...]:
        """The chain of each stage."""
        stages = layout.stages
        key = (stages, 1, () if layout.uniform else layout.edits)
        if key not in self.chains:
            cut = stage_layers(self.model.layers, stages)
            self.chains[key] = tuple(
                (((EMBEDDING, 1),) if s == 0 else ())
                + self.recorder.kinds(layers, layout)
                + (((HEAD, 1),) if s == stages - 1 else ())
                for s, layers in enumerate(cut)
            )
        return self.chains[key]

    def rank(self, layout: Layout, pp_rank: int) -> RankPrice:
        """Price the ranks of pipeline coordinate `pp_rank`."""
        stages, made = self.stages(layout, pp_rank), self.buckets(layout, pp_rank)
        inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
        beside = max(bucket_workspace(b, self.policy, layout.elementwise) for b in made)
        data = fed(inputs, layout.gradient_accumulation_steps, self.widths) + sum(s.remembered for s in stages)
        pools = self.pools(layout, pp_rank, stages)
        [(arena, routed)], [host] = pools.activations(layout, (pp_rank,)), pools.pinned(layout, (pp_rank,))
        flops, seams = self.work(layout, pp_rank)
        return RankPrice(
            resident=owned(((b, 1) for b in made), self.policy) | ringed(*self.rings(layout, pp_rank))
            | {"data": data},
            arena=arena, routed=routed, workspace=max(beside, *(s.workspace for s in stages)),
            flops=flops + Counter(update=self._update(made, layout, pp_rank)), seams=seams,
            host=host + sum(away(b, self.policy) for b in made),
        )  # fmt: skip

    def _update(self, made: Iterable[Bucket], layout: Layout, pp_rank: int) -> Flops:
        """Of the first of a stage's ranks, which has the largest matrices."""
        rank = Mesh(layout).group("pp", 0)[pp_rank]
        return sum(muon.flops(b, muon.own(b, rank)) for b in made if b.mover.by_matrix)

    def work(self, layout: Layout, pp_rank: int) -> tuple[Counter[str], Counter[Wire]]:
        """A step's FLOPs by phase, without the update, and bytes on wires."""
        each = [w for chain in self.chains_of(layout, pp_rank) for w in self._work(chain, layout)]
        return _total(layout, [flops for flops, _ in each]), _total(layout, [wires for _, wires in each])

    def _work(self, chain: Chain, layout: Layout) -> Iterator[tuple[Counter[str], Counter[Wire]]]:
        """FLOPs by phase and bytes on wires, of each piece of a chain."""
        seen = sight(layout)
        for kind, n in chain:
            yield from repeat(self.recorder.work(self.piece(kind, layout, seen), layout), n)

    def stages(self, layout: Layout, pp_rank: int) -> tuple[StageSum, ...]:
        """What the chunks of a pipeline rank sum up to. Of equal stages, it is one object."""
        seen = sight(layout)
        known, chains = self.sums.setdefault(seen, {}), self.chains_of(layout, pp_rank)
        for chain in chains:
            if chain not in known:
                known[chain] = add_up(self._runs(chain, layout, seen), self._borders(shown(chain), layout, seen))
        return tuple([known[chain] for chain in chains])

    def pools(self, layout: Layout, pp_rank: int, stages: tuple[StageSum, ...]) -> Pools:
        """The slots of a rank whose chunks are `stages`."""
        key = (sight(layout), self.chains_of(layout, pp_rank))
        if key not in self.pooled:
            self.pooled[key] = Pools.of(stages)
        return self.pooled[key]

    def _borders(self, chain: Chain, layout: Layout, seen: Sight) -> Borders:
        key = (chain, seen)
        if key not in self.borders:
            self.borders[key] = borders(self._runs(chain, layout, seen))
        return self.borders[key]

    def _runs(self, chain: Chain, layout: Layout, seen: Sight) -> list[tuple[Holding, int]]:
        return [(self.holding(kind, layout, seen), n) for kind, n in chain]

    def chains_of(self, layout: Layout, pp_rank: int) -> Chains:
        return self.deal(layout).by_rank[pp_rank]

    def deal(self, layout: Layout) -> Deal:
        """The chains of each pipeline rank, one a chunk."""
        key = (layout.pp, layout.vpp, () if layout.uniform else layout.edits)
        if key not in self.dealt:
            self.dealt[key] = Deal.of(self.stage_chains(layout), layout.pp)
        return self.dealt[key]

    def placed(self, layout: Layout, pp_rank: int) -> list[tuple[Kind, tuple[Param, ...]]]:
        """The pieces of a rank, one by one in the order of forward, with the parameters that each is first to use.

        A layer's are those of the layer that was recorded: equal layers show the same.
        """
        out: list[tuple[Kind, tuple[Param, ...]]] = []
        seen, ends = sight(layout), set[str]()
        for chain in self.chains_of(layout, pp_rank):
            for kind, n in chain:
                params = self.piece(kind, layout, seen).params
                if kind in ENDS:
                    out.append((kind, tuple(p for p in params if p.name not in ends)))
                    ends |= {p.name for p in params}
                else:
                    out += [(kind, params)] * n
        return out

    def packs(self, layout: Layout, pp_rank: int) -> Iterator[Pack]:
        """The groups of parameters that fill the buckets of a rank."""
        both = shared(self.model)
        placed = ((some, self._marks(kind, layout)) for kind, some in self.placed(layout, pp_rank))
        units = [Unit(some, marks.late, both, marks.coded) for some, marks in placed]
        where = homes(self.model, layout, {p.name: pp_rank for u in units for p in u.params})
        return packs(units, where, Mesh(layout), self.policy, self.movers)

    def _marks(self, kind: Kind, layout: Layout) -> _Marks:
        if layout.zero < 2:
            return _Marks()
        piece = self.piece(kind, layout, sight(layout))
        if id(piece) not in self.marked:
            self.marked[id(piece)] = _Marks(waiting(piece), coded(piece))
        return self.marked[id(piece)]

    def rings(self, layout: Layout, pp_rank: int) -> tuple[Bytes, Bytes]:
        """Bytes of a rank's rings: of gathered parameters, and of gradients in one action."""
        if layout.zero < 2:
            return 0, 0
        kinds = [kind for kind, _ in self.placed(layout, pp_rank)]
        first, gathered, summed = dict[Kind, int](), Counter[int](), Counter[int]()
        for unit, kind in enumerate(kinds):
            first.setdefault(kind, unit)  # those of a kind are alike
        mesh = Mesh(layout)
        rank = mesh.group("pp", 0)[pp_rank]
        for pack in self._unit_packs(layout, pp_rank):
            if first[kinds[pack.unit]] == pack.unit:
                b = bucket_of(pack.at(pp_rank), mesh, rank)
                gathered[pack.unit] += gathered_bytes(b, self.widths)
                summed[pack.unit] += summed_bytes(b, self.widths)
        parameters = {unit: gathered[first[kind]] for unit, kind in enumerate(kinds)}
        gradients = {unit: summed[first[kind]] for unit, kind in enumerate(kinds)}
        n = places(layout, len(kinds))
        return sum(ring_sizes(parameters, n)), sum(ring_sizes(gradients, PLACES))

    def unit_buckets(self, layout: Layout, pp_rank: int) -> Iterator[Bucket]:
        """The buckets of a rank that are of one unit."""
        found = zip(self._unit_buckets(layout, pp_rank), self._unit_packs(layout, pp_rank), strict=True)
        return (replace(b, unit=unit, params=pack.params) for (unit, b), pack in found)

    def _unit_packs(self, layout: Layout, pp_rank: int) -> Iterator[Pack]:
        return (pack for pack in self._all_packs(layout, pp_rank) if pack.unit != NONE)

    def _unit_buckets(self, layout: Layout, pp_rank: int) -> Iterator[tuple[int, Bucket]]:
        """Of each unit; buckets of the same size are one."""
        mesh, known = Mesh(layout), dict[tuple[Alike, int], Bucket]()
        rank = mesh.group("pp", 0)[pp_rank]
        for pack in self._unit_packs(layout, pp_rank):
            key = (pack.alike, pack.elements)
            if key not in known:
                known[key] = bucket_of(pack.at(pp_rank), mesh, rank)
            yield pack.unit, known[key]

    def buckets(self, layout: Layout, pp_rank: int) -> tuple[Bucket, ...]:
        """The buckets of a rank."""
        mesh = Mesh(layout)
        rank = mesh.ranks(range(pp_rank, pp_rank + 1), range(1), range(1))[0]
        return tuple(bucket_of(pack, mesh, rank) for pack in self.packs(layout, pp_rank))

    def counted_packs(self, layout: Layout, pp_rank: int) -> tuple[tuple[Pack, int], ...]:
        """The packs of a rank, of those of one kind and size the first, and how many there are of them."""
        key = self._packing(layout, pp_rank)
        if key not in self.counted:
            first: dict[tuple[object, int], Pack] = {}
            count = Counter[tuple[object, int]]()
            for pack in self._all_packs(layout, pp_rank):
                alike = pack.alike
                several = len(alike.homes)
                own = (alike.decay, alike.late, alike.moments, alike.gathered_as, pack.unit == NONE)
                size = ((alike.cut, several, own, pack.shapes), pack.elements)
                first.setdefault(size, pack)
                count[size] += 1
            self.counted[key] = tuple((pack, count[size]) for size, pack in first.items())
        return self.counted[key]

    def _all_packs(self, layout: Layout, pp_rank: int) -> tuple[Pack, ...]:
        """The packs of a rank, or of another with the same stages: `Pack.at` makes them this one's."""
        key = self._packing(layout, pp_rank)
        if key not in self.packed:
            self.packed[key] = tuple(self.packs(layout, pp_rank))
        return self.packed[key]

    def _packing(self, layout: Layout, pp_rank: int) -> tuple[object, ...]:
        """What decides the packs of a rank."""
        lay, chains = layout, self.chains_of(layout, pp_rank)
        edge = (lay.pp, pp_rank) if self.shared(chains) else ()
        return (chains, lay.tp, lay.ep, lay.expert_tp, lay.bucket_bytes, max(1, lay.zero), edge)

    def shared(self, chains: tuple[Chain, ...]) -> bool:
        """Whether these stages have parameters that live on others too."""
        m = self.model
        return (m.tied or m.predict_ahead > 0) and any(kind in ENDS for chain in chains for kind, _ in chain)


def _total(layout: Layout, parts: Iterable[Mapping[_Key, int]]) -> Counter[_Key]:
    """Of all micro-batches and chunks."""
    out = Counter[_Key]()
    for part in parts:
        for key, amount in part.items():
            out[key] += amount * layout.gradient_accumulation_steps
    return +out
