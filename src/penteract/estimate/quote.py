"""What a layout takes on a cluster: memory and a bound of its time from sums, its time from the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum, gcd

from penteract.estimate.composed import Composer
from penteract.estimate.ideal import PARTS, Forward, StepFlops
from penteract.estimate.lane import Laned, beside_lane
from penteract.estimate.memory import Memory
from penteract.estimate.packed import Groups, Runs, first_rank
from penteract.estimate.passes import PassTimes, Way
from penteract.estimate.pipeline import critical_path
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reads import Memos, tracked
from penteract.estimate.reduction import Reduction, Tail, ready, reduction, turns, used
from penteract.estimate.timing import Part
from penteract.ops.bodies.fp8 import check_sizes
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


@dataclass(slots=True)
class Quoter:
    """Quotes layouts of one model on one cluster. What two of them share is priced once."""

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str | Policy = "bf16"
    movers: Movers = PLAIN
    composer: Composer = field(init=False)
    memory: Memory = field(init=False)
    rates: Rates = field(init=False)
    passes: PassTimes = field(init=False)
    memos: Memos = field(default_factory=Memos)
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        self.precision = policy(self.precision)
        self.composer = Composer(self.model, self.sequence_length, self.precision, self.movers)
        self.memory = Memory(self.composer)
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
        held = self.memory.of(layout)
        bound = _least(self.passes.ways(layout), self._sums(layout))
        return Quote(layout, held.kinds, held.allocated, held.by_stage, bound, held.host, self.composer.policy)

    def check_sizes(self, layout: Layout) -> None:
        """Refuse, as the engine does, a layout whose linears are not whole units of their FP8 recipe, or that does not
        gather what travels as codes."""
        if self.composer.policy.fp8 is None:
            return
        check_gather(self.composer.policy.fp8, layout)
        pieces = 2 if layout.cp > 1 else 1
        for kind in {kind for chain in self.composer.stage_chains(layout) for kind, _ in chain}:
            check_sizes(self.composer.piece(layout, kind).sites, pieces)

    def floor(self, layout: Layout) -> Bytes:
        """Bytes that the fullest rank holds at least: `quote.allocated` is no less."""
        return self.memory.at_least(layout)

    def bound(self, quote: Quote) -> Seconds:
        """A closer lower bound of the step's time, with what ZeRO 2 and 3 do beside the passes."""
        lay = quote.layout
        if lay.zero < 2:
            return quote.at_least
        ways = self.passes.ways_of(lay, tuple([lane.passes for lane in self._lanes(lay)]))
        return _least(ways, self._sums(lay))

    def bound_of_plain(self, quote: Quote) -> Seconds:
        """A lower bound of the same without recomputation: nothing is computed again for longer than it was at first,
        by no rank in any micro-batch, nor on the way of the first of them."""
        lay = quote.layout
        forward = [fsum([t["Fwd"] for t in chunks]) for chunks in self.passes.of(lay)]
        way = fsum([forward[g] for g in self.composer.deal(lay).group]) if lay.pp > 1 else 0.0
        return quote.at_least - lay.gradient_accumulation_steps * max(forward) - way

    def time(self, quote: Quote) -> StepTime:
        """The step's time with the schedule played out."""
        lay = quote.layout
        lanes = self._lanes(lay)
        ends = critical_path(lay, [lanes[g].passes for g in self.composer.deal(lay).group], self.passes.wire(lay))
        norm = self.rates.collective("all_reduce", Span.of(tuple(range(lay.world)), self.cluster.gpus_per_node), 16)
        tails = [self._tail(lay, r, norm) for r in range(lay.pp)]
        finish = [end + tail.data + tail.update for end, tail in zip(ends, tails, strict=True)]
        # The optimizer of every rank waits for the gradient's norm over all.
        seconds = max(e + t.data for e, t in zip(ends, tails, strict=True)) + max(t.update for t in tails)
        r = max(range(lay.pp), key=finish.__getitem__)
        parts = self._parts(lay, r)
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

    # ---- time ------------------------------------------------------------------------------------------------

    def _sums(self, layout: Layout) -> list[Reduction]:
        """Of each group of pipeline ranks with the same stages, that which takes longest."""
        return self._sums_of(layout, self.composer.packer.groups(layout))

    @tracked
    def _sums_of(self, layout: Layout, groups: Groups) -> list[Reduction]:
        out = list[Reduction]()
        for runs, ranks in zip(groups.runs, groups.ranks, strict=True):
            stages = {self._stage(layout, runs, r) for r in ranks}
            out.append(max([self._reduction(layout, runs, s) for s in sorted(stages)], key=lambda s: s.reduce))
        return out

    def _stage(self, layout: Layout, runs: Runs, r: int) -> int:
        """A stage whose sums and gathers are those of stage r, which has these units: the first that lies on nodes like
        it, unless other stages share its parameters."""
        if self.composer.packer.shares(runs):
            return r
        each, node = layout.rows * layout.tp, self.cluster.gpus_per_node
        even = each % node == 0 or node % each == 0  # all stages lie on nodes alike
        return 0 if even else r % (node // gcd(each, node))

    @tracked
    def _reduction(self, layout: Layout, runs: Runs, stage: int) -> Reduction:
        packer = self.composer.packer
        made = [(packer.bucket(layout, pack, stage), n) for pack, n in packer.counted(layout, runs, stage)]
        return reduction(made, self.rates, self.policy, self.cluster.gpus_per_node)

    @tracked
    def _lanes(self, layout: Layout) -> tuple[Laned, ...]:
        """Of each group of pipeline ranks with the same stages, with what ZeRO does beside them."""
        if layout.zero < 2:
            return tuple(Laned(passes, 0.0, 0.0) for passes in self.passes.of(layout))
        deal, passes, rates, node = self.composer.deal(layout), self.passes, self.rates, self.cluster.gpus_per_node
        made = [
            beside_lane(self.composer, layout, ranks[0], passes.seconds(layout), rates, node) for ranks in deal.alike
        ]
        chains = [deal.by_rank[ranks[0]] for ranks in deal.alike]
        return tuple(
            lane._replace(passes=passes.waited(lane.passes, own, layout))
            for lane, own in zip(made, chains, strict=True)
        )

    def _parts(self, layout: Layout, r: int) -> dict[Part, Seconds]:
        """Of all passes of rank r."""
        parts = defaultdict[Part, Seconds](float)
        for chain in self.composer.chains_of(layout, r):
            if waits := self.passes.waits(chain, layout):
                parts["host"] += layout.gradient_accumulation_steps * fsum(waits.values())
            for kind, n in chain:
                for told in self.passes.timed(layout, kind).parts.values():
                    for part, seconds in told.items():
                        parts[part] += layout.gradient_accumulation_steps * n * seconds
        lane = self._lanes(layout)[self.composer.deal(layout).group[r]]
        parts["data"] += layout.gradient_accumulation_steps * lane.exposed
        return parts

    def _tail(self, layout: Layout, r: int, norm: Seconds) -> Tail:
        """What comes after the last backward of rank r. `norm`: seconds of the sum of the gradient's norm.

        A sum under way makes the backward above it slower, which is counted with the sums.
        """
        packer, mesh = self.composer.packer, Mesh(layout)
        runs = packer.runs(layout, r)
        made = self._reduction(layout, runs, self._stage(layout, runs, r))
        packs, rank = tuple(packer.packs(layout, r)), first_rank(mesh, r)
        told = turns(packs, mesh, rank, self.rates, self.composer.policy, gpus_per_node=self.cluster.gpus_per_node)
        placed, seconds = packer.placed(layout, r), self.passes.seconds(layout)
        at, end = ready(placed, seconds, packs)
        hidden, gathers = min(made.reduce, end), told.after_update(used(placed, seconds, packs), self.rates.beside)
        data = told.after_backward(at, end) + hidden * (self.rates.beside - 1)
        data += self._lanes(layout)[self.composer.deal(layout).group[r]].ends
        return Tail(data, made.update + gathers + norm, gathers, made.wait)

    def _limit(self, layout: Layout, parts: Mapping[Part, Seconds], seconds: Seconds) -> str:
        """The largest reason why a step is not at the device's peak."""
        if self.cluster.gpu is None:
            return ""
        asked = self.model_flops(layout.global_batch_size * self.sequence_length).causal
        ideal = asked / layout.world / self.cluster.gpu.peak(policy(self.precision).products)
        return self._asked().limit(parts, seconds, ideal)


def _least(ways: list[Way], sums: list[Reduction]) -> Seconds:
    """By group of pipeline ranks, what their passes take, and their gradients after them."""
    bound = 0.0
    for (own, way, last), s in zip(ways, sums, strict=True):
        bound = max(bound, way, own + max(0.0, s.reduce - last))
    return bound + max([s.update for s in sums])
