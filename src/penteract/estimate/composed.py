"""The price of a rank put together from pieces, without a walk of its step: the same numbers, a thousand times faster.

`tests/estimate/test_composed.py` holds it equal to the walk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penteract.estimate.pieces import ENDS, Kind, Piece, Recorder, Sight, sight
from penteract.estimate.price import fed, held
from penteract.estimate.stages import StageSum, add_up
from penteract.model.decoder import homes
from penteract.ops.params import Param
from penteract.ops.spec import WIDTHS, Widths
from penteract.parallel.data import Bucket, Pack, bucket_of, packs
from penteract.parallel.pipeline import stage_layers
from penteract.schedule.in_flight import most_in_flight
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.step.arena import Pool, share_slots
from penteract.step.places import Span
from penteract.units import Bytes

_Key = TypeVar("_Key")
Chain = tuple[tuple[Kind, int], ...]  # the pieces of a stage in order, runs of equal ones counted


@dataclass(frozen=True, slots=True)
class RankPrice:
    """What a pipeline rank holds. As `Price`: resident bytes, the arena, what is routed, one body's workspace."""

    resident: Mapping[str, Bytes]
    arena: Bytes
    routed: Bytes
    workspace: Bytes
    flops: Counter[str]
    seams: Counter[tuple[str, str]]  # collective, axis

    @property
    def allocated(self) -> Bytes:
        return sum(self.resident.values()) + self.arena + self.routed + self.workspace


@dataclass(slots=True)
class Composer:
    """Prices ranks of layouts of one model. What two layouts show alike is recorded once."""

    model: ModelSpec
    sequence_length: int
    precision: str
    recorder: Recorder = field(init=False)
    pieces: dict[tuple[Kind, Sight], Piece] = field(default_factory=dict[tuple[Kind, Sight], Piece])
    sums: dict[tuple[Chain, Sight], StageSum] = field(default_factory=dict[tuple[Chain, Sight], StageSum])
    dealt: dict[tuple[int, int], tuple[tuple[Chain, ...], ...]] = field(
        default_factory=dict[tuple[int, int], tuple[tuple[Chain, ...], ...]]
    )
    packed: dict[tuple[object, ...], tuple[tuple[Pack, int], ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[tuple[Pack, int], ...]]
    )
    chains: dict[int, tuple[Chain, ...]] = field(default_factory=dict[int, tuple[Chain, ...]])

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.model, self.sequence_length, self.widths)

    @property
    def widths(self) -> Widths:
        return WIDTHS[self.precision]

    def piece(self, kind: Kind, layout: Layout, seen: Sight) -> Piece:
        key = (kind, self.recorder.sight_of(kind, layout, seen))
        if key not in self.pieces:
            self.pieces[key] = self.recorder.record(kind, layout)
        return self.pieces[key]

    def stage_chains(self, stages: int) -> tuple[Chain, ...]:
        """The chain of each stage."""
        if stages not in self.chains:
            cut = stage_layers(self.model.layers, stages)
            self.chains[stages] = tuple(
                ((("embedding", 1),) if s == 0 else ())
                + self.recorder.kinds(layers)
                + ((("head", 1),) if s == stages - 1 else ())
                for s, layers in enumerate(cut)
            )
        return self.chains[stages]

    def stage(self, chain: Chain, layout: Layout, seen: Sight) -> StageSum:
        key = (chain, seen)
        if key not in self.sums:
            self.sums[key] = add_up([(self.piece(kind, layout, seen), n) for kind, n in chain])
        return self.sums[key]

    def rank(self, layout: Layout, pp_rank: int) -> RankPrice:
        """Price the ranks of pipeline coordinate `pp_rank`."""
        stages, made = self.stages(layout, pp_rank), self.buckets(layout, pp_rank)
        inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
        update = max(b.shard_size for b in made) * self.widths["stat"]
        arena, routed = activations_of(layout, stages)
        return RankPrice(
            resident=held(made, self.widths) | {"data": fed(inputs, layout.gradient_accumulation_steps, self.widths)},
            arena=arena[pp_rank], routed=routed[pp_rank],
            workspace=max(update, *(s.workspace for s in stages)),
            flops=_total(layout, [s.flops for s in stages]), seams=_total(layout, [s.wires for s in stages]),
        )  # fmt: skip

    def stages(self, layout: Layout, pp_rank: int) -> tuple[StageSum, ...]:
        """What the chunks of a pipeline rank sum up to."""
        seen = sight(layout)
        return tuple(self.stage(chain, layout, seen) for chain in self.chains_of(layout, pp_rank))

    def chains_of(self, layout: Layout, pp_rank: int) -> tuple[Chain, ...]:
        return self.chains_by_rank(layout)[pp_rank]

    def chains_by_rank(self, layout: Layout) -> tuple[tuple[Chain, ...], ...]:
        """The chains of each pipeline rank, one a chunk."""
        pp, vpp = layout.pp, layout.vpp
        if (pp, vpp) not in self.dealt:
            chains = self.stage_chains(pp * vpp)
            self.dealt[pp, vpp] = tuple(tuple(chains[c * pp + r] for c in range(vpp)) for r in range(pp))
        return self.dealt[pp, vpp]

    def placed(self, layout: Layout, pp_rank: int, *, named: bool = True) -> list[tuple[Kind, tuple[Param, ...]]]:
        """The pieces of a rank, one by one in the order of forward, with the parameters that each is first to use.

        A layer's have names of their own: those of the layer that was recorded, behind its place here. Not `named`,
        equal layers show the same.
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
                    at = len(out)
                    out += [
                        (kind, tuple(replace(p, name=f"{at + i}/{p.name}") for p in params) if named else params)
                        for i in range(n)
                    ]
        return out

    def packs(self, layout: Layout, pp_rank: int, *, named: bool = False) -> Iterator[Pack]:
        """The groups of parameters that fill the buckets of a rank."""
        params = [p for _, some in self.placed(layout, pp_rank, named=named) for p in some]
        where = homes(self.model, layout, {p.name: pp_rank for p in params})
        return packs(reversed(params), where, Mesh(layout), self.widths["stat"])

    def buckets(self, layout: Layout, pp_rank: int, *, named: bool = False) -> tuple[Bucket, ...]:
        """The buckets of a rank."""
        mesh = Mesh(layout)
        rank = mesh.ranks(range(pp_rank, pp_rank + 1), range(1), range(1))[0]
        return tuple(bucket_of(pack, mesh, rank) for pack in self.packs(layout, pp_rank, named=named))

    def counted_packs(self, layout: Layout, pp_rank: int) -> tuple[tuple[Pack, int], ...]:
        """The packs of a rank, of those of one kind and size the first, and how many there are of them."""
        lay, chains = layout, self.chains_of(layout, pp_rank)
        key = (
            chains,
            lay.tp,
            lay.ep,
            lay.expert_tp,
            lay.bucket_bytes,
            (lay.pp, pp_rank) if self.shared(chains) else (),
        )
        if key not in self.packed:
            first: dict[tuple[object, int], Pack] = {}
            count = Counter[tuple[object, int]]()
            for pack in self.packs(layout, pp_rank):
                size = ((pack.alike[0], len(pack.alike[1]), pack.alike[2]), pack.elements)
                first.setdefault(size, pack)
                count[size] += 1
            self.packed[key] = tuple((pack, count[size]) for size, pack in first.items())
        return self.packed[key]

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


def activations_of(layout: Layout, stages: tuple[StageSum, ...]) -> tuple[tuple[Bytes, ...], tuple[Bytes, ...]]:
    """The arena, and what is routed, if these were the stages of each pipeline rank: the schedule alone tells them
    apart. Routed registers have storages of their own: never more than this at once."""
    pool, block = share_slots([s.slots for s in stages])
    arena = [max(n for s in stages for n in s.scratch.values())] * layout.pp
    for shared, members in _members(pool).items():
        size = block[shared]
        arena = [a + size * n for a, n in zip(arena, _in_flight(layout, members), strict=True)]
    routed = [max(s.routed_scratch for s in stages)] * layout.pp
    for c, s in enumerate(stages):
        for span, size in s.routed.items():
            routed = [a + size * n for a, n in zip(routed, _in_flight(layout, ((c, span),)), strict=True)]
    return tuple(arena), tuple(routed)


def _members(pool: Mapping[tuple[int, Span], Pool]) -> dict[Pool, tuple[tuple[int, Span], ...]]:
    out: dict[Pool, tuple[tuple[int, Span], ...]] = {}
    for member, shared in pool.items():
        out[shared] = (*out.get(shared, ()), member)
    return out


def _in_flight(layout: Layout, members: tuple[tuple[int, Span], ...]) -> tuple[int, ...]:
    lay = layout
    return most_in_flight(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, members)
