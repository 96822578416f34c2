"""What a layout takes on a cluster: memory and a bound of its time from sums, its time from the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum
from operator import add

from penteract.estimate.composed import Chain, Composer, activations_of
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import Kind, Sight, sight
from penteract.estimate.pipeline import Passes, critical_path, least
from penteract.estimate.price import fed
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reduction import Reduction, Turns, reduction, turns
from penteract.estimate.timing import Device, Part, time_piece
from penteract.ops.bodies import BODIES
from penteract.ops.tape import Site
from penteract.parallel.data import bucket_of
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.units import Bytes, Flops, Seconds

_Shape = tuple[object, ...]  # what decides the passes of all pipeline ranks
PARTS = ("compute", "attention", "pointwise", "tensor", "context", "expert", "launch", "pipeline", "data", "update")
_REASONS: Mapping[str, str] = {
    "compute": "matrix products below the peak", "attention": "attention below the peak",
    "pointwise": "pointwise words: device memory", "tensor": "waiting for tensor ranks",
    "context": "waiting for context ranks", "expert": "waiting for expert ranks", "launch": "launching kernels",
    "pipeline": "the pipeline's bubble and sends", "data": "summing gradients", "update": "the optimizer",
}  # fmt: skip


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
class StepFlops:
    """FLOPs that training asks of a step: three times a forward pass. Causal: of attention, half."""

    full: Flops
    causal: Flops


@dataclass(frozen=True, slots=True)
class _Held:
    """What all pipeline ranks hold beside their buckets: the arena with what is routed, data, workspace."""

    activations: tuple[Bytes, ...]
    data: tuple[Bytes, ...]
    workspace: tuple[Bytes, ...]


@dataclass(slots=True)
class Quoter:
    """Quotes layouts of one model on one cluster. What two of them share is priced once."""

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str = "bf16"
    composer: Composer = field(init=False)
    rates: Rates = field(init=False)
    _pieces: dict[tuple[Kind, Sight], dict[str, dict[Part, Seconds]]] = field(
        default_factory=dict[tuple[Kind, Sight], dict[str, dict[Part, Seconds]]]
    )
    _costs: dict[tuple[Site, str], tuple[Part, Seconds]] = field(
        default_factory=dict[tuple[Site, str], tuple[Part, Seconds]]
    )
    _passes: dict[_Shape, tuple[Passes, ...]] = field(default_factory=dict[_Shape, tuple[Passes, ...]])
    _held: dict[_Shape, _Held] = field(default_factory=dict[_Shape, _Held])
    _reductions: dict[_Shape, Reduction] = field(default_factory=dict[_Shape, Reduction])
    _bounds: dict[_Shape, tuple[tuple[Seconds, Seconds], ...]] = field(
        default_factory=dict[_Shape, tuple[tuple[Seconds, Seconds], ...]]
    )

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
        seen = sight(layout)
        there = self._holding(layout, seen)
        sums = self._sums(layout)
        by_stage = tuple(
            sum(s.held.values()) + a + d + max(w, s.largest)
            for s, a, d, w in zip(sums, there.activations, there.data, there.workspace, strict=True)
        )
        r = max(range(layout.pp), key=by_stage.__getitem__)
        other = there.data[r] + max(there.workspace[r], sums[r].largest)
        memory = {**sums[r].held, "activations": there.activations[r], "other": other}
        return Quote(layout, memory, by_stage[r], by_stage, self._least(layout, seen, sums))

    def time(self, quote: Quote) -> StepTime:
        """The step's time with the schedule played out."""
        lay, seen = quote.layout, sight(quote.layout)
        passes = self._passes_of(lay, seen)
        ends = critical_path(lay, passes, self._wire(lay))
        tails = [self._tail(lay, seen, r) for r in range(lay.pp)]
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
        forward, scores = self._forward()
        per = self.sequence_length
        return StepFlops(3 * forward * tokens // per, 3 * (2 * forward - scores) * tokens // (2 * per))

    # ---- memory ----------------------------------------------------------------------------------------------

    def _holding(self, layout: Layout, seen: Sight) -> _Held:
        lay = layout
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
        if key not in self._held:
            alike: dict[tuple[Chain, ...], tuple[tuple[Bytes, ...], Bytes, Bytes]] = {}
            rows: list[tuple[Bytes, Bytes, Bytes]] = []
            for r, chains in enumerate(self.composer.chains_by_rank(lay)):
                if chains not in alike:
                    alike[chains] = self._holds(lay, r)
                activations, data, workspace = alike[chains]
                rows.append((activations[r], data, workspace))
            self._held[key] = _Held(*(tuple(column) for column in zip(*rows, strict=True)))
        return self._held[key]

    def _holds(self, layout: Layout, r: int) -> tuple[tuple[Bytes, ...], Bytes, Bytes]:
        """Of all ranks whose stages are those of rank r: activations by rank, data, workspace."""
        stages = self.composer.stages(layout, r)
        inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
        data = fed(inputs, layout.gradient_accumulation_steps, self.composer.widths)
        arena, routed = activations_of(layout, stages)
        return tuple(map(add, arena, routed)), data, max(s.workspace for s in stages)

    def _sums(self, layout: Layout) -> list[Reduction]:
        """Of each pipeline rank; those with the same stages have the same."""
        known: dict[tuple[Chain, ...], Reduction] = {}
        out: list[Reduction] = []
        for r, chains in enumerate(self.composer.chains_by_rank(layout)):
            if chains not in known:
                known[chains] = self._reduction(layout, r, chains)
            out.append(known[chains])
        return out

    def _reduction(self, layout: Layout, r: int, chains: tuple[Chain, ...]) -> Reduction:
        lay = layout
        edge = (lay.pp, r) if self.composer.shared(chains) else ()
        key = (chains, lay.dp, lay.tp, lay.cp, lay.ep, lay.expert_tp, lay.zero, lay.bucket_bytes, edge)
        if key not in self._reductions:
            mesh = Mesh(lay)
            rank = mesh.group("pp", 0)[r]
            made = [(bucket_of(pack, mesh, rank), n) for pack, n in self.composer.counted_packs(lay, r)]
            self._reductions[key] = reduction(made, self.rates, self.composer.widths, self.cluster.gpus_per_node)
        return self._reductions[key]

    def _turns(self, layout: Layout, r: int) -> Turns:
        made = self.composer.buckets(layout, r)
        return turns(made, self.rates, self.composer.widths, self.cluster.gpus_per_node)

    # ---- time ------------------------------------------------------------------------------------------------

    def _timed(self, kind: Kind, layout: Layout, seen: Sight) -> dict[str, dict[Part, Seconds]]:
        key = (kind, self.composer.recorder.sight_of(kind, layout, seen))
        if key not in self._pieces:
            load = Balanced.of(self.model, layout, self.sequence_length)
            device = Device(
                self.rates, self.composer.widths, Mesh(layout), self.cluster.gpus_per_node, load, self._costs
            )
            self._pieces[key] = time_piece(self.composer.piece(kind, layout, seen), device)
        return self._pieces[key]

    def _passes_of(self, layout: Layout, seen: Sight) -> tuple[Passes, ...]:
        key = (seen, layout.pp, layout.vpp)
        if key not in self._passes:
            known: dict[Chain, Mapping[str, Seconds]] = {}
            out: list[Passes] = []
            for r in range(layout.pp):
                chains = self.composer.chains_of(layout, r)
                for chain in chains:
                    if chain not in known:
                        known[chain] = self._pass(chain, layout, seen)
                out.append(tuple(known[chain] for chain in chains))
            self._passes[key] = tuple(out)
        return self._passes[key]

    def _pass(self, chain: Chain, layout: Layout, seen: Sight) -> Mapping[str, Seconds]:
        total = defaultdict[str, Seconds](float)
        for kind, n in chain:
            for action, parts in self._timed(kind, layout, seen).items():
                total[action] += n * fsum(parts.values())
        return total

    def _least(self, layout: Layout, seen: Sight, sums: list[Reduction]) -> Seconds:
        lay = layout
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, lay.dp)
        if key not in self._bounds:
            self._bounds[key] = least(lay, self._passes_of(lay, seen), self._wire(lay))
        passes = self._passes_of(lay, seen)
        bound = 0.0
        for (own, way), s, chunks in zip(self._bounds[key], sums, passes, strict=True):
            last = fsum(t for times in chunks for action, t in times.items() if action != "Fwd")
            bound = max(bound, way, own + max(0.0, s.reduce - last))
        return bound + max(s.update for s in sums)

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
                for told in self._timed(kind, layout, seen).values():
                    for part, seconds in told.items():
                        parts[part] += layout.gradient_accumulation_steps * n * seconds
        return parts

    def _tail(self, layout: Layout, seen: Sight, r: int) -> tuple[Seconds, Seconds]:
        """After the last backward of rank r: seconds of sums that it did not hide, and of the update with its gathers.

        A sum under way makes the backward above it slower, which is counted with the sums.
        """
        made, told = self._reduction(layout, r, self.composer.chains_of(layout, r)), self._turns(layout, r)
        ready, end = self._ready(layout, seen, r)
        hidden = min(made.reduce, end)
        norm = self.rates.collective("all_reduce", Span.of(tuple(range(layout.world)), self.cluster.gpus_per_node), 16)
        data = told.after_backward(ready, end) + hidden * (self.rates.beside - 1)
        return data, made.update + told.after_update() + norm

    def _ready(self, layout: Layout, seen: Sight, r: int) -> tuple[list[Seconds], Seconds]:
        """When each bucket's last gradient is written, from the start of the last backward, and when that ends."""
        now, at = 0.0, dict[str, Seconds]()
        for kind, params in reversed(self.composer.placed(layout, r)):
            times = self._timed(kind, layout, seen)
            now += fsum(fsum(parts.values()) for action, parts in times.items() if action != "Fwd")
            at |= {p.name: now for p in params}
        made = self.composer.buckets(layout, r, named=True)
        return [max(at[p.name] for p in b.params) for b in made], now

    # ---- what it is held against -----------------------------------------------------------------------------

    def _forward(self) -> tuple[Flops, Flops]:
        """Of one sequence's forward pass on one device: all products, and those of attention."""
        lone, forward, scores = Layout(attention="flash"), 0, 0
        load, seen = Balanced.of(self.model, lone, self.sequence_length), sight(lone)
        for kind, n in self.composer.stage_chains(1)[0]:
            for op in self.composer.piece(kind, lone, seen).chunk.tape.ops:
                body = BODIES.get(op.site.word)
                if op.program is None and body is not None:
                    ins = [s.shape for s in op.site.ins]
                    known = [tuple(d if isinstance(d, int) else load.rows for d in shape) for shape in ins]
                    flops = n * body.flops("forward", known, op.site.weights, op.site.attrs)
                    forward, scores = forward + flops, scores + flops * (op.site.word == "attention")
        return forward, scores

    def _limit(self, layout: Layout, parts: Mapping[Part, Seconds], seconds: Seconds) -> str:
        """The largest reason why a step is not at the device's peak."""
        if self.cluster.gpu is None:
            return ""
        lost = dict(parts)
        tokens = layout.global_batch_size * self.sequence_length
        flops, (forward, scores) = self.model_flops(tokens), self._forward()
        ideal = flops.causal / layout.world / self.cluster.gpu.peak(self.precision)
        share = scores / (2 * forward - scores)
        lost["compute"] = max(0.0, lost["compute"] - ideal * (1 - share))
        lost["attention"] = max(0.0, lost["attention"] - ideal * share)
        worst = max(lost, key=lost.__getitem__)
        return f"{_REASONS[worst]}, {100 * lost[worst] / seconds:.0f} %"
