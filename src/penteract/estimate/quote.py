"""What a layout takes on a cluster: memory and a bound of its time from sums, its time from the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum
from typing import NamedTuple

from penteract.estimate.composed import Chains, Composer, activations_of
from penteract.estimate.ideal import PARTS, Forward, StepFlops
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import Kind, Sight, sight
from penteract.estimate.pipeline import Passes, critical_path, least
from penteract.estimate.price import fed
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reduction import Reduction, Turns, reduction, turns
from penteract.estimate.stages import Chain
from penteract.estimate.timing import Device, Part, time_piece
from penteract.ops.tape import Site
from penteract.parallel.data import bucket_of
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.units import Bytes, Flops, Seconds

_Shape = tuple[object, ...]  # what decides the passes of all pipeline ranks


@dataclass(frozen=True, slots=True)
class Quote:
    """Memory by kind of the fullest pipeline rank, in bytes, and a lower bound of the step's time.

    memory    parameters, gradients, optimizer, activations (kept and scratch), other (data, what a body allocates)
    by_stage  all kinds together, of each pipeline rank
    """

    layout: Layout
    memory: Mapping[str, Bytes]
    allocated: Bytes
    by_stage: tuple[Bytes, ...]
    at_least: Seconds


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts on the rank that sets the pace: they sum to it."""

    seconds: Seconds
    parts: Mapping[Part, Seconds]
    limited_by: str


@dataclass(frozen=True, slots=True)
class _Held:
    """What pipeline ranks hold beside their buckets: the arena with what is routed, of each; data and workspace, of
    each group of ranks with the same stages."""

    activations: tuple[Bytes, ...]
    data: tuple[Bytes, ...]
    workspace: tuple[Bytes, ...]


class _Timed(NamedTuple):
    """A pass through a piece by action: seconds of its parts, and of all of them."""

    parts: Mapping[str, Mapping[Part, Seconds]]
    seconds: Mapping[str, Seconds]


@dataclass(slots=True)
class Quoter:
    """Quotes layouts of one model on one cluster. What two of them share is priced once."""

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str = "bf16"
    composer: Composer = field(init=False)
    rates: Rates = field(init=False)
    _pieces: dict[tuple[Kind, Sight], _Timed] = field(default_factory=dict[tuple[Kind, Sight], _Timed])
    _costs: dict[tuple[Site, str], tuple[Part, Seconds]] = field(
        default_factory=dict[tuple[Site, str], tuple[Part, Seconds]]
    )
    _chains: dict[Sight, dict[Chain, Mapping[str, Seconds]]] = field(
        default_factory=dict[Sight, dict[Chain, Mapping[str, Seconds]]]
    )
    _passes: dict[_Shape, tuple[Passes, ...]] = field(default_factory=dict[_Shape, tuple[Passes, ...]])
    _held: dict[_Shape, _Held] = field(default_factory=dict[_Shape, _Held])
    _reductions: dict[_Shape, Reduction] = field(default_factory=dict[_Shape, Reduction])
    _bounds: dict[_Shape, list[tuple[Seconds, Seconds, Seconds]]] = field(
        default_factory=dict[_Shape, list[tuple[Seconds, Seconds, Seconds]]]
    )
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        self.composer = Composer(self.model, self.sequence_length, self.precision)
        self.rates = Rates.of(self.cluster, self.precision)

    @property
    def basis(self) -> Mapping[str, str]:
        """Where each rate comes from."""
        return self.rates.basis

    # ---- a layout --------------------------------------------------------------------------------------------

    def quote(self, layout: Layout) -> Quote:
        """Price a legal layout."""
        seen, deal = sight(layout), self.composer.deal(layout)
        there, sums = self._holding(layout, seen), self._sums(layout)
        beside = [
            sum(s.held.values()) + data + max(workspace, s.largest)
            for s, data, workspace in zip(sums, there.data, there.workspace, strict=True)
        ]
        by_stage = tuple([a + beside[g] for a, g in zip(there.activations, deal.group, strict=True)])
        r = max(range(layout.pp), key=by_stage.__getitem__)
        g = deal.group[r]
        other = there.data[g] + max(there.workspace[g], sums[g].largest)
        memory = {**sums[g].held, "activations": there.activations[r], "other": other}
        return Quote(layout, memory, by_stage[r], by_stage, self._least(layout, seen, sums))

    def time(self, quote: Quote) -> StepTime:
        """The step's time with the schedule played out."""
        lay, seen = quote.layout, sight(quote.layout)
        passes = self._passes_of(lay, seen)
        ends = critical_path(lay, [passes[g] for g in self.composer.deal(lay).group], self._wire(lay))
        norm = self.rates.collective("all_reduce", Span.of(tuple(range(lay.world)), self.cluster.gpus_per_node), 16)
        tails = [self._tail(lay, seen, r, norm) for r in range(lay.pp)]
        finish = [end + data + update for end, (data, update) in zip(ends, tails, strict=True)]
        # The optimizer of every rank waits for the gradient's norm over all.
        seconds = max(e + d for e, (d, _) in zip(ends, tails, strict=True)) + max(update for _, update in tails)
        r = max(range(lay.pp), key=finish.__getitem__)
        parts = self._parts(lay, seen, r)
        data, update = tails[r]
        gathers = self._turns(lay, r).after_update()
        parts["update"] += update - gathers
        parts["data"] += data + gathers
        parts["pipeline"] += seconds - fsum(parts.values())
        told = {name: parts[name] for name in PARTS}
        return StepTime(seconds, told, self._limit(lay, told, seconds))

    def model_flops(self, tokens: int) -> StepFlops:
        """What training on `tokens` tokens asks, at this sequence length, whatever the layout."""
        return self._asked().step(tokens, self.sequence_length)

    def _asked(self) -> Forward:
        if self._forward is None:
            self._forward = Forward.of(self.composer)
        return self._forward

    def remade_flops(self, layout: Layout) -> Flops:
        """What all ranks together compute a second time in a step."""

        def forward(lay: Layout) -> Flops:
            return sum(self.composer.rank(lay, r).flops["forward"] for r in range(lay.pp)) * (lay.world // lay.pp)

        return forward(layout) - forward(replace(layout, remake=()))

    # ---- memory ----------------------------------------------------------------------------------------------

    def _holding(self, layout: Layout, seen: Sight) -> _Held:
        lay = layout
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
        if key not in self._held:
            activations, data, workspace = [0] * lay.pp, list[Bytes](), list[Bytes]()
            for ranks in self.composer.deal(lay).alike:
                stages = self.composer.stages(lay, ranks[0])
                for r, (arena, routed) in zip(ranks, activations_of(lay, stages, ranks), strict=True):
                    activations[r] = arena + routed
                inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
                data.append(fed(inputs, lay.gradient_accumulation_steps, self.composer.widths))
                workspace.append(max([s.workspace for s in stages]))
            self._held[key] = _Held(tuple(activations), tuple(data), tuple(workspace))
        return self._held[key]

    def _sums(self, layout: Layout) -> list[Reduction]:
        """Of each group of pipeline ranks with the same stages."""
        deal = self.composer.deal(layout)
        each = layout.world // layout.pp
        node = self.cluster.gpus_per_node
        if each % node == 0 or node % each == 0:  # all stages lie on nodes alike
            return [self._reduction(layout, ranks[0], deal.by_rank[ranks[0]]) for ranks in deal.alike]
        told = [[self._reduction(layout, r, deal.by_rank[r]) for r in ranks] for ranks in deal.alike]
        return [max(some, key=lambda s: s.reduce) for some in told]

    def _reduction(self, layout: Layout, r: int, chains: Chains) -> Reduction:
        lay = layout
        edge = (lay.pp, r) if self.composer.shared(chains) else ()
        place = r * (lay.world // lay.pp) % self.cluster.gpus_per_node  # of the stage's first rank on its node
        key = (chains, place, lay.dp, lay.tp, lay.cp, lay.ep, lay.expert_tp, lay.zero, lay.bucket_bytes, edge)
        if key not in self._reductions:
            mesh = Mesh(lay)
            rank = mesh.group("pp", 0)[r]
            made = [(bucket_of(pack.at(r), mesh, rank), n) for pack, n in self.composer.counted_packs(lay, r)]
            self._reductions[key] = reduction(made, self.rates, self.composer.widths, self.cluster.gpus_per_node)
        return self._reductions[key]

    def _turns(self, layout: Layout, r: int) -> Turns:
        mesh = Mesh(layout)
        packs, node = self.composer.packs(layout, r), self.cluster.gpus_per_node
        return turns(packs, mesh, mesh.group("pp", 0)[r], self.rates, self.composer.widths, gpus_per_node=node)

    # ---- time ------------------------------------------------------------------------------------------------

    def _timed(self, kind: Kind, layout: Layout, seen: Sight) -> _Timed:
        key = (kind, self.composer.recorder.sight_of(kind, layout, seen))
        if key not in self._pieces:
            load = Balanced.of(self.model, layout, self.sequence_length)
            piece, known = self.composer.piece(kind, layout, seen), self.composer.recorder.workspaces
            device = Device(
                self.rates, self.composer.widths, Mesh(layout), self.cluster.gpus_per_node, load, known, self._costs
            )
            parts = time_piece(piece, device)
            self._pieces[key] = _Timed(parts, {action: fsum(told.values()) for action, told in parts.items()})
        return self._pieces[key]

    def _passes_of(self, layout: Layout, seen: Sight) -> tuple[Passes, ...]:
        """Of each group of pipeline ranks with the same stages."""
        key = (seen, layout.pp, layout.vpp)
        if key not in self._passes:
            known, deal = self._chains.setdefault(seen, {}), self.composer.deal(layout)
            for chain in {chain for ranks in deal.alike for chain in deal.by_rank[ranks[0]]}:
                if chain not in known:
                    known[chain] = self._pass(chain, layout, seen)
            own = (deal.by_rank[ranks[0]] for ranks in deal.alike)
            self._passes[key] = tuple(tuple([known[chain] for chain in chains]) for chains in own)
        return self._passes[key]

    def _pass(self, chain: Chain, layout: Layout, seen: Sight) -> Mapping[str, Seconds]:
        total = dict[str, Seconds]()
        for kind, n in chain:
            for action, seconds in self._timed(kind, layout, seen).seconds.items():
                total[action] = total.get(action, 0.0) + n * seconds
        return total

    def _least(self, layout: Layout, seen: Sight, sums: list[Reduction]) -> Seconds:
        lay = layout
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, lay.dp)
        if key not in self._bounds:
            deal, passes = self.composer.deal(lay), self._passes_of(lay, seen)
            by_rank = least(lay.gradient_accumulation_steps, [passes[g] for g in deal.group], self._wire(lay))
            self._bounds[key] = [
                (
                    max([by_rank[r][0] for r in ranks]),
                    max([by_rank[r][1] for r in ranks]),
                    fsum([t for times in chunks for action, t in times.items() if action != "Fwd"]),
                )
                for ranks, chunks in zip(deal.alike, passes, strict=True)
            ]
        bound = 0.0
        for (own, way, last), s in zip(self._bounds[key], sums, strict=True):
            bound = max(bound, way, own + max(0.0, s.reduce - last))
        return bound + max([s.update for s in sums])

    def _wire(self, layout: Layout) -> Seconds:
        """Of a message between stages, over the slowest border."""
        lay = layout
        if lay.pp == 1:
            return 0.0
        rows = self.sequence_length // lay.cp // lay.tp * lay.micro_batch_size
        amount = rows * self.model.hidden_size * self.composer.widths["compute"]
        return self.rates.send(amount, across=lay.world > self.cluster.gpus_per_node)

    def _parts(self, layout: Layout, seen: Sight, r: int) -> dict[Part, Seconds]:
        """Of all passes of rank r."""
        parts = defaultdict[Part, Seconds](float)
        for chain in self.composer.chains_of(layout, r):
            for kind, n in chain:
                for told in self._timed(kind, layout, seen).parts.values():
                    for part, seconds in told.items():
                        parts[part] += layout.gradient_accumulation_steps * n * seconds
        return parts

    def _tail(self, layout: Layout, seen: Sight, r: int, norm: Seconds) -> tuple[Seconds, Seconds]:
        """After the last backward of rank r: seconds of sums that it did not hide, and of the update with its gathers
        and the sum of the gradient's norm.

        A sum under way makes the backward above it slower, which is counted with the sums.
        """
        made, told = self._reduction(layout, r, self.composer.chains_of(layout, r)), self._turns(layout, r)
        ready, end = self._ready(layout, seen, r)
        hidden = min(made.reduce, end)
        data = told.after_backward(ready, end) + hidden * (self.rates.beside - 1)
        return data, made.update + told.after_update() + norm

    def _ready(self, layout: Layout, seen: Sight, r: int) -> tuple[list[Seconds], Seconds]:
        """When each bucket's last gradient is written, from the start of the last backward, and when that ends."""
        now, at = 0.0, dict[int, list[Seconds]]()  # by identity: equal layers share their parameters
        for kind, params in reversed(self.composer.placed(layout, r)):
            now += fsum(t for action, t in self._timed(kind, layout, seen).seconds.items() if action != "Fwd")
            for p in params:
                at.setdefault(id(p), []).append(now)
        turn = {p: iter(times) for p, times in at.items()}  # packs take them in this order
        return [max([next(turn[id(p)]) for p in pack.params]) for pack in self.composer.packs(layout, r)], now

    def _limit(self, layout: Layout, parts: Mapping[Part, Seconds], seconds: Seconds) -> str:
        """The largest reason why a step is not at the device's peak."""
        if self.cluster.gpu is None:
            return ""
        asked = self.model_flops(layout.global_batch_size * self.sequence_length).causal
        ideal = asked / layout.world / self.cluster.gpu.peak(self.precision)
        return self._asked().limit(parts, seconds, ideal)
