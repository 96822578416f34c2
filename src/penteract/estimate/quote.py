"""What a layout takes on a cluster: memory and a bound of its time from sums, its time from the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from penteract.estimate.composed import Chains, Composer
from penteract.estimate.floor import Floor
from penteract.estimate.ideal import PARTS, Forward, StepFlops
from penteract.estimate.lane import Laned, beside_lane
from penteract.estimate.passes import PassTimes, Shape
from penteract.estimate.pieces import Sight, sight
from penteract.estimate.pipeline import Passes, critical_path
from penteract.estimate.price import fed, ringed
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reduction import Reduction, Tail, ready, reduction, turns, used
from penteract.estimate.timing import Part
from penteract.ops.bodies.fp8 import check_sizes
from penteract.parallel.data import bucket_of
from penteract.spec.fp8 import check_gather
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.movers import PLAIN, Movers
from penteract.spec.precision import RECIPES, Policy, policy
from penteract.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True)
class Quote:
    """Memory by kind of the fullest pipeline rank, in bytes, and a lower bound of the step's time.

    memory    parameters, gradients, optimizer, activations (kept and scratch), other (data, what a body
              allocates, what ZeRO 2 and 3 have whole for a while)
    by_stage  all kinds together, of each pipeline rank
    host      bytes on the host, of the rank that keeps most there
    """

    layout: Layout
    memory: Mapping[str, Bytes]
    allocated: Bytes
    by_stage: tuple[Bytes, ...]
    at_least: Seconds
    host: Bytes = 0
    precision: Policy = RECIPES["bf16"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts on the rank that sets the pace: they sum to it."""

    seconds: Seconds
    parts: Mapping[Part, Seconds]
    limited_by: str


@dataclass(frozen=True, slots=True)
class _Held:
    """What pipeline ranks hold beside their buckets: the arena with what is routed, of each; data, workspace and
    what is on the host, of each group of ranks with the same stages."""

    activations: tuple[Bytes, ...]
    data: tuple[Bytes, ...]
    workspace: tuple[Bytes, ...]
    host: tuple[Bytes, ...]


@dataclass(slots=True)
class Quoter:
    """Quotes layouts of one model on one cluster. What two of them share is priced once."""

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str | Policy = "bf16"
    movers: Movers = PLAIN
    composer: Composer = field(init=False)
    keeps: Floor = field(init=False)
    rates: Rates = field(init=False)
    passes: PassTimes = field(init=False)
    _laned: dict[Shape, tuple[Laned, ...]] = field(default_factory=dict[Shape, tuple[Laned, ...]])
    _held: dict[Shape, _Held] = field(default_factory=dict[Shape, _Held])
    _reductions: dict[Shape, Reduction] = field(default_factory=dict[Shape, Reduction])
    _summed: dict[Shape, list[Reduction]] = field(default_factory=dict[Shape, list[Reduction]])
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        self.precision = policy(self.precision)
        self.composer = Composer(self.model, self.sequence_length, self.precision, self.movers)
        self.keeps = Floor(self.composer)
        self.rates = Rates.of(self.cluster, self.precision.products, fp8=self.precision.fp8 is not None)
        self.passes = PassTimes(self.composer, self.cluster, self.rates)

    @property
    def policy(self) -> Policy:
        return self.composer.policy

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
            sum(s.held.values()) + s.ring + data + max(workspace, s.largest)
            for s, data, workspace in zip(sums, there.data, there.workspace, strict=True)
        ]
        by_stage = tuple([a + beside[g] for a, g in zip(there.activations, deal.group, strict=True)])
        r = max(range(layout.pp), key=by_stage.__getitem__)
        g = deal.group[r]
        other = there.data[g] + max(there.workspace[g], sums[g].largest) + sums[g].ring
        memory = {**sums[g].held, "activations": there.activations[r], "other": other}
        bound = self._least(layout, self.passes.of(layout, seen), (seen,), sums)
        host = max([pinned + s.host for pinned, s in zip(there.host, sums, strict=True)])
        return Quote(layout, memory, by_stage[r], by_stage, bound, host, self.composer.policy)

    def check_sizes(self, layout: Layout) -> None:
        """Refuse, as the engine does, a layout whose linears are not whole units of their FP8 recipe, or that does not
        gather what travels as codes."""
        if self.composer.policy.fp8 is None:
            return
        check_gather(self.composer.policy.fp8, layout)
        seen, pieces = sight(layout), 2 if layout.cp > 1 else 1
        for kind in {kind for chain in self.composer.stage_chains(layout) for kind, _ in chain}:
            check_sizes(self.composer.piece(kind, layout, seen).sites, pieces)

    def floor(self, layout: Layout) -> Bytes:
        """Bytes that the fullest rank holds at least: `quote.allocated` is no less."""
        kept = self.keeps.per_sequence(layout)
        return max(
            sum(s.held.values()) + s.ring + layout.micro_batch_size * n
            for s, n in zip(self._sums(layout), kept, strict=True)
        )

    def bound(self, quote: Quote) -> Seconds:
        """A closer lower bound of the step's time, with what ZeRO 2 and 3 do beside the passes."""
        lay, seen = quote.layout, sight(quote.layout)
        if lay.zero < 2:
            return quote.at_least
        passes = tuple(lane.passes for lane in self._lanes(lay, seen))
        return self._least(lay, passes, (seen, *_sharding(lay)), self._sums(lay))

    def bound_of_plain(self, quote: Quote) -> Seconds:
        """A lower bound of the same without recomputation: nothing is computed again for longer than it was at first,
        by no rank in any micro-batch, nor on the way of the first of them."""
        lay = quote.layout
        forward = [fsum([t["Fwd"] for t in chunks]) for chunks in self.passes.of(lay, sight(lay))]
        way = fsum([forward[g] for g in self.composer.deal(lay).group]) if lay.pp > 1 else 0.0
        return quote.at_least - lay.gradient_accumulation_steps * max(forward) - way

    def time(self, quote: Quote) -> StepTime:
        """The step's time with the schedule played out."""
        lay, seen = quote.layout, sight(quote.layout)
        lanes = self._lanes(lay, seen)
        ends = critical_path(lay, [lanes[g].passes for g in self.composer.deal(lay).group], self.passes.wire(lay))
        norm = self.rates.collective("all_reduce", Span.of(tuple(range(lay.world)), self.cluster.gpus_per_node), 16)
        tails = [self._tail(lay, seen, r, norm) for r in range(lay.pp)]
        finish = [end + tail.data + tail.update for end, tail in zip(ends, tails, strict=True)]
        # The optimizer of every rank waits for the gradient's norm over all.
        seconds = max(e + t.data for e, t in zip(ends, tails, strict=True)) + max(t.update for t in tails)
        r = max(range(lay.pp), key=finish.__getitem__)
        parts = self._parts(lay, seen, r)
        data, update, gathers, wait = tails[r]
        parts["update"] += update - gathers - wait
        parts["host"] += wait
        parts["data"] += data + gathers
        parts["pipeline"] += seconds - fsum(parts.values())
        told = {name: parts[name] for name in PARTS if name != "host" or lay.offload or lay.offload_optimizer}
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
            return sum(self.composer.work(lay, r)[0]["forward"] for r in range(lay.pp)) * (lay.world // lay.pp)

        return forward(layout) - forward(replace(layout, remake=(), remake_else=()))

    # ---- memory ----------------------------------------------------------------------------------------------

    def _holding(self, layout: Layout, seen: Sight) -> _Held:
        lay = layout
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
        if key not in self._held:
            activations, data, workspace, host = [0] * lay.pp, list[Bytes](), list[Bytes](), list[Bytes]()
            for ranks in self.composer.deal(lay).alike:
                stages = self.composer.stages(lay, ranks[0])
                pools = self.composer.pools(lay, ranks[0], stages)
                for r, (arena, routed) in zip(ranks, pools.activations(lay, ranks), strict=True):
                    activations[r] = arena + routed
                host.append(max(pools.pinned(lay, ranks)) if lay.offload else 0)
                inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
                beside = sum([s.remembered for s in stages])
                data.append(fed(inputs, lay.gradient_accumulation_steps, self.composer.widths) + beside)
                workspace.append(max([s.workspace for s in stages]))
            self._held[key] = _Held(tuple(activations), tuple(data), tuple(workspace), tuple(host))
        return self._held[key]

    def _sums(self, layout: Layout) -> list[Reduction]:
        """Of each group of pipeline ranks with the same stages."""
        lay, node = layout, self.cluster.gpus_per_node
        key = (lay.dp * lay.cp, lay.tp, lay.pp, lay.vpp, lay.ep, lay.expert_tp, *_sharding(lay))
        if key not in self._summed:
            deal, each = self.composer.deal(lay), lay.world // lay.pp
            even = each % node == 0 or node % each == 0  # all stages lie on nodes alike
            told = [
                [self._reduction(lay, r, deal.by_rank[r]) for r in ranks[: 1 if even else None]] for ranks in deal.alike
            ]
            self._summed[key] = [max(some, key=lambda s: s.reduce) for some in told]
        return self._summed[key]

    def _reduction(self, layout: Layout, r: int, chains: Chains) -> Reduction:
        lay = layout
        edge = (lay.pp, r) if self.composer.shared(chains) else ()
        place = r * (lay.world // lay.pp) % self.cluster.gpus_per_node  # of the stage's first rank on its node
        # dp and cp share parameters alike: who holds what is known from their product.
        key = (chains, place, lay.dp * lay.cp, lay.tp, lay.ep, lay.expert_tp, *_sharding(lay), edge)
        if key not in self._reductions:
            mesh = Mesh(lay)
            rank = mesh.group("pp", 0)[r]
            p = self.composer.policy
            packs = ((pack.at(r), n) for pack, n in self.composer.counted_packs(lay, r))
            made = [(bucket_of(pack, mesh, rank), n) for pack, n in packs]
            ring = sum(ringed(*self.composer.rings(lay, r)).values())
            self._reductions[key] = reduction(made, ring, self.rates, p, lay.elementwise, self.cluster.gpus_per_node)
        return self._reductions[key]

    # ---- time ------------------------------------------------------------------------------------------------

    def _lanes(self, layout: Layout, seen: Sight) -> tuple[Laned, ...]:
        """Of each group of pipeline ranks with the same stages, with what ZeRO does beside them."""
        if layout.zero < 2:
            return tuple(Laned(passes, 0.0, 0.0) for passes in self.passes.of(layout, seen))
        lay = layout
        key = (seen, lay.dp, lay.pp, lay.vpp, lay.gradient_accumulation_steps, lay.schedule, *_sharding(lay))
        if key not in self._laned:
            rates, node = self.rates, self.cluster.gpus_per_node
            deal = self.composer.deal(lay)
            made = [
                beside_lane(self.composer, lay, ranks[0], self.passes.seconds(lay, seen), rates, node)
                for ranks in deal.alike
            ]
            chains = [deal.by_rank[ranks[0]] for ranks in deal.alike]
            self._laned[key] = tuple(
                lane._replace(passes=self.passes.waited(lane.passes, own, lay, seen))
                for lane, own in zip(made, chains, strict=True)
            )
        return self._laned[key]

    def _least(self, layout: Layout, passes: tuple[Passes, ...], known: Shape, sums: list[Reduction]) -> Seconds:
        """`known`: what decides the passes."""
        bound = 0.0
        for (own, way, last), s in zip(self.passes.ways(layout, passes, known), sums, strict=True):
            bound = max(bound, way, own + max(0.0, s.reduce - last))
        return bound + max([s.update for s in sums])

    def _parts(self, layout: Layout, seen: Sight, r: int) -> dict[Part, Seconds]:
        """Of all passes of rank r."""
        parts = defaultdict[Part, Seconds](float)
        for chain in self.composer.chains_of(layout, r):
            if waits := self.passes.waits(chain, layout, seen):
                parts["host"] += layout.gradient_accumulation_steps * fsum(waits.values())
            for kind, n in chain:
                for told in self.passes.timed(kind, layout, seen).parts.values():
                    for part, seconds in told.items():
                        parts[part] += layout.gradient_accumulation_steps * n * seconds
        lane = self._lanes(layout, seen)[self.composer.deal(layout).group[r]]
        parts["data"] += layout.gradient_accumulation_steps * lane.exposed
        return parts

    def _tail(self, layout: Layout, seen: Sight, r: int, norm: Seconds) -> Tail:
        """What comes after the last backward of rank r. `norm`: seconds of the sum of the gradient's norm.

        A sum under way makes the backward above it slower, which is counted with the sums.
        """
        made, mesh = self._reduction(layout, r, self.composer.chains_of(layout, r)), Mesh(layout)
        packs, rank = tuple(self.composer.packs(layout, r)), mesh.group("pp", 0)[r]
        told = turns(packs, mesh, rank, self.rates, self.composer.policy, gpus_per_node=self.cluster.gpus_per_node)
        placed, seconds = self.composer.placed(layout, r), self.passes.seconds(layout, seen)
        at, end = ready(placed, seconds, packs)
        hidden, gathers = min(made.reduce, end), told.after_update(used(placed, seconds, packs), self.rates.beside)
        data = told.after_backward(at, end) + hidden * (self.rates.beside - 1)
        data += self._lanes(layout, seen)[self.composer.deal(layout).group[r]].ends
        return Tail(data, made.update + gathers + norm, gathers, made.wait)

    def _limit(self, layout: Layout, parts: Mapping[Part, Seconds], seconds: Seconds) -> str:
        """The largest reason why a step is not at the device's peak."""
        if self.cluster.gpu is None:
            return ""
        asked = self.model_flops(layout.global_batch_size * self.sequence_length).causal
        ideal = asked / layout.world / self.cluster.gpu.peak(policy(self.precision).products)
        return self._asked().limit(parts, seconds, ideal)


def _sharding(layout: Layout) -> Shape:
    """What decides how buckets are cut and moved."""
    lay = layout
    return (lay.zero, lay.shard_group, lay.whole_gradients, lay.keep_gathered, lay.bucket_bytes, lay.offload_optimizer,
            lay.elementwise)  # fmt: skip
