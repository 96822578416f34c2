"""Lower bounds of the step time from sums alone. A search uses them before it simulates a step.

Every op of the clock is monotone: from a later state, or with more ops in between, nothing ends sooner. So simulate an
action of a layer with nothing in flight, no bucket events and a host far ahead: no step takes less for it. A stream is
busy for the sum of its collectives, and the host launches every call. A step lasts from when all ranks know a gradient
norm until they know the next one: an update, then the micro-batches, on each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from types import MappingProxyType
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.ops.offload import LAYER_INPUTS, OFFLOAD_OPS
from penteract.parallel.bucket_plans import FsdpUnit
from penteract.readings.buckets.planned import Runs, StageGroups
from penteract.readings.costs.rates import GroupSpan
from penteract.readings.layers.layer_program import LayerProgram, LayerType
from penteract.readings.layers.reads import Memos, changed, tracked
from penteract.readings.price import host_optimizer_bytes
from penteract.readings.time.clock import FIRST, MILLION
from penteract.readings.time.lower_bounds.gather_counts import RankOf, gathered
from penteract.readings.time.lower_bounds.idle import IdleLayer, from_idle
from penteract.readings.time.lower_bounds.passes import Chunk, Passes, PlayedPasses, of_group
from penteract.readings.time.lower_bounds.sharded_passes import ShardedPasses
from penteract.readings.time.lower_bounds.simpler import (
    ROUNDED,
    SimplerMesh,
    with_whole_backward,
    without_order_of_backward,
)
from penteract.readings.time.ops import AXES
from penteract.readings.time.step import StepClock
from penteract.units import Seconds

_SEPARATE = tuple(range(FIRST, FIRST + len(AXES)))  # every axis on a stream of its own
_Ranks = tuple[int, ...]


class Once(NamedTuple):
    """Seconds of a rank's bucket events.

    update      the update, after the norm is known; `measure`: the sums of squares before it
    sums        reductions once a step, on the busiest stream: none begins before the last micro-batch
    accumulate  adding reduced gradients in each micro-batch, where they are sharded; `wires`: their reductions in each
                micro-batch, on each stream
    wires_once  collectives once a step, on each stream
    """

    update: Seconds
    measure: Seconds
    sums: Seconds
    accumulate: Seconds
    wires: Mapping[_Ranks, Seconds]
    wires_once: Mapping[_Ranks, Seconds]


class Gathered(NamedTuple):
    """A unit whose parameters are sharded: the actions that read these, and the seconds of an all-gather on each
    stream."""

    read: frozenset[str]
    wires: tuple[tuple[_Ranks, Seconds], ...]


_NO_WIRES: Mapping[_Ranks, Seconds] = MappingProxyType({})
_NOTHING = Once(0.0, 0.0, 0.0, 0.0, {}, {})


@dataclass(slots=True)
class Bounds:
    """Lower bounds of simulated steps. Sums that layouts share are computed once.

    slower  millionths by which passes are computed more slowly beside their own collectives: up to half the speed.
            Beside a collective that slows compute further, other work may end a pass sooner, as it takes the
            collective's time. Passes that lose less than they do are a bound all the same
    """

    steps: StepClock
    slower: int = 0
    memos: Memos = field(default_factory=Memos)
    of_groups: dict[object, list[Passes]] = field(default_factory=dict[object, "list[Passes]"])
    chunks: dict[object, Chunk] = field(default_factory=dict[object, "Chunk"])
    counts: dict[object, tuple[int, ...]] = field(default_factory=dict[object, tuple[int, ...]])  # of gathers
    _best: Bounds | None = None
    _sharded: ShardedPasses = field(init=False)

    def __post_init__(self) -> None:
        """Make the reading of passes with bucket events."""
        self._sharded = ShardedPasses(self.steps, self._idle_of)

    @staticmethod
    def contended(steps: StepClock) -> Bounds:
        """Bounds by passes that lose what they lose beside their own collectives."""
        return Bounds(steps, min(steps.slower, MILLION))

    def of(self, layout: Layout) -> Seconds:
        """The bound of a layout's step."""
        groups = self.steps.composer.bucket_planner.groups(layout)
        return self._longest(layout, self.passes(layout), self._once_of(layout, groups),
                             self._gathers_of(layout, groups))  # fmt: skip

    def at_least(self, layout: Layout) -> Seconds:
        """The bound from passes alone. It holds for any ZeRO stage and optimizer."""
        return self._of_passes(layout, self.passes(layout), 1.0)

    def roughly(self, layout: Layout, largest: int, quick: Sequence[Passes]) -> Seconds:
        """A looser bound from passes, for any micro-batch of up to `largest` sequences: one estimate, at that size
        (`quick`), serves all.

        At the best rates, the seconds of a call per sequence fall as micro-batches grow. So do those of a pass, as the
        clock is monotone. A loss in one chunk costs no more than one in many.
        """
        return self._of_passes(layout, quick, layout.micro_batch_size / largest)

    def roughest(self, layout: Layout, largest: int, mesh: SimplerMesh) -> Seconds:
        """The same for this layout and all that differ from it by a larger micro-batch: their ranks compute as long,
        and a micro-batch takes longer to reach them. The host is left out: it launches fewer calls for these. `mesh`:
        one of `simpler_meshes`, whose passes serve."""
        tp, cp = mesh
        simple = with_whole_backward(layout)
        quick = self._quickest_on(simple, tp, cp, largest, simple is not layout)
        own = mesh == (layout.tp, layout.cp) and simple is layout
        share = 1.0 if own else tp * cp / (layout.tp * layout.cp) * ROUNDED
        return max(self._ends(layout, quick, share * layout.micro_batch_size / largest))

    @tracked
    def _quickest_on(self, layout: Layout, tp: int, cp: int, largest: int, joined: bool) -> Sequence[Passes]:
        """`joined`: the passes are to serve a layout whose backward is split."""
        quick = self.quickest(changed(layout, tp=tp, cp=cp), largest)
        return without_order_of_backward(quick) if joined else quick

    def quickest(self, layout: Layout, largest: int) -> Sequence[Passes]:
        """Seconds of passes at the best rates, with a micro-batch of `largest` sequences, the only one of a step: its
        weight gradients are added to nothing. Layouts that differ only in the micro-batch size have the same."""
        if self._best is None:
            steps = self.steps
            self._best = Bounds(StepClock(steps.composer, steps.cluster, steps.rates.at_best()))
        chunk = self.steps.composer.sequence_length * largest if layout.loss == "chunked" else 0
        one = {"micro_batch_size": largest, "gradient_accumulation_steps": 1, "loss_chunk": chunk}
        return self._best.passes(changed(layout, **one))

    def played(self, layout: Layout) -> Seconds:
        """The bound from passes and messages with all waits of the schedule, and of bucket events within passes. 0, if
        results of ops are offloaded: passes on their own wait for copies that others would wait for."""
        if not {LAYER_INPUTS}.issuperset(layout.offload):
            return 0.0
        sharded = self._sharded.differ(layout)
        return self._played_of(layout, self._sharded.passes(layout)) if sharded else self._played(layout)

    @tracked
    def _played(self, layout: Layout) -> Seconds:
        """The same without bucket events. It holds for any ZeRO stage."""
        return self._played_of(layout, [passes.played for passes in self.passes(layout)])

    def _played_of(self, layout: Layout, passes: Sequence[PlayedPasses]) -> Seconds:
        group = self.steps.composer.assignment(layout).group
        return self.steps.of_passes(layout, [passes[g].chunks for g in group], [passes[g].early for g in group])

    def alone(self, layout: Layout) -> Seconds:
        """The bound from one pipeline rank, simulated without its peers: the one whose passes end last. It costs far
        more than the other bounds."""
        passes, bucket_planner = self.passes(layout), self.steps.composer.bucket_planner
        reached, group = layout.placement.reached, self.steps.composer.assignment(layout).group
        border = self._borders(layout)
        ends = self._ends(layout, passes, 1.0)
        place = ends.index(max(ends))
        there = back = fsum(border[:place])
        for r in reached[:place]:
            there, back = there + passes[group[r]].on, back + passes[group[r]].off
        there += self._once_of(layout, bucket_planner.groups(layout))[reached[0]].update
        return self.steps.lower_bound(layout, reached[place], there, back)

    # ---- passes ----------------------------------------------------------------------------------------------

    def passes(self, layout: Layout) -> Sequence[Passes]:
        """Seconds of passes, for each group of pipeline ranks with the same stages."""
        assignment = self.steps.composer.assignment(layout)
        idle = {kind: self._idle_of(layout, kind) for kind in assignment.kinds}
        key = (assignment, *idle.values())
        if (found := self.of_groups.get(key)) is None:
            each = [self._chunk(tuple([(idle[kind], n) for kind, n in chain])) for chain in assignment.chains]
            found = self.of_groups[key] = list(map(of_group, assignment.by_group(each)))
        return found

    def _chunk(self, chain: tuple[tuple[IdleLayer, int], ...]) -> Chunk:
        """One micro-batch in a model chunk of these layers."""
        if (found := self.chunks.get(chain)) is None:
            total: dict[str, Seconds] = {}
            waits = lost = slack = host = 0.0
            for idle, n in chain:
                for action, result in idle.actions.items():
                    total[action] = total.get(action, 0.0) + n * result.seconds
                    waits, slack, host = waits + n * result.waits, slack + n * result.slack, host + n * result.host
                    lost += n * result.lost
            ends = {action: chain[0 if action == "Fwd" else -1][0].actions.get(action) for action in total}
            early = {action: end.early for action, end in ends.items() if end is not None and end.early}
            found = self.chunks[chain] = total, early, waits, lost, slack, host
        return found

    @tracked
    def _idle_of(self, layout: Layout, kind: LayerType) -> IdleLayer:
        return self._idle(layout, self.steps.composer.layer_program(layout, kind))

    @tracked
    def _idle(self, layout: Layout, layer: LayerProgram) -> IdleLayer:
        ops = self.steps.layer_ops(layout, layer, _SEPARATE)
        return IdleLayer({
            name: from_idle(own, self.steps.launch_ps, layer.reads_message(name), self.slower)
            for name, own in ops.items()
        })  # fmt: skip

    # ---- buckets ---------------------------------------------------------------------------------------------

    def _once_of(self, layout: Layout, groups: StageGroups) -> list[Once]:
        """Bucket events of each pipeline rank."""
        out, unlike = [_NOTHING] * layout.pp, not self.steps.pp_ranks_aligned_to_nodes(layout)
        for runs, ranks in zip(groups.joined, groups.ranks, strict=True):
            if unlike or self.steps.composer.bucket_planner.shares(runs):
                for r in ranks:
                    out[r] = self._once(layout, runs, r)
                continue
            once = self._once(layout, runs, 0)
            for r in ranks:
                out[r] = once
        return out

    def _gathers_of(self, layout: Layout, groups: StageGroups) -> Mapping[int, Mapping[_Ranks, Seconds]]:
        """Seconds of all-gathers in a step, on each stream: for the pipeline ranks of each group, or for one of them if
        these are placed on nodes in different ways. Ranks with the same stages gather units differently often, as they
        have other orders of passes; those that gather alike share one object."""
        if layout.zero < 3:
            return {}
        aligned, out = self.steps.pp_ranks_aligned_to_nodes(layout), dict[int, Mapping[_Ranks, Seconds]]()
        for runs, ranks in zip(groups.runs, groups.ranks, strict=True):
            units = self._gathered_units(layout, runs, 0 if aligned else ranks[0])
            alike = dict[tuple[int, ...], Mapping[_Ranks, Seconds]]()
            for r in ranks if aligned else ranks[:1]:
                counts = self._counts(layout, runs, r, units)
                if counts not in alike:
                    alike[counts] = _sums(units, counts)
                out[r] = alike[counts]
        return out

    @tracked
    def _once(self, layout: Layout, runs: Runs, pp_rank: int) -> Once:
        bucket_planner, costs = self.steps.composer.bucket_planner, self.steps.bucket_costs
        update = measure = accumulate = 0.0
        copies, last = [0.0, 0.0], defaultdict[_Ranks, Seconds](float)
        wires, once = defaultdict[_Ranks, Seconds](float), defaultdict[_Ranks, Seconds](float)
        for plan, n in bucket_planner.counted(layout, runs, pp_rank):
            b = bucket_planner.bucket(layout, plan, pp_rank)
            update, measure = update + n * costs.update(b), measure + n * costs.squares(b)
            if b.offloaded:
                for i, op_name in enumerate(OFFLOAD_OPS):
                    copies[i] += n * costs.rates.copy(op_name, host_optimizer_bytes(b, costs.policy))
            if b.cut_gradients:
                accumulate += n * costs.accumulate(b)
            if b.shards > 1:
                (wires if b.cut_gradients else last)[b.shard_ranks] += n * costs.on_wire("reduce_scatter", b)
                if not b.cut_parameters:
                    once[b.shard_ranks] += n * costs.on_wire("all_gather", b)
            if len(b.replicate_ranks) > 1:
                last[b.replicate_ranks] += n * costs.on_wire("all_reduce", b)
        for ranks, seconds in last.items():
            once[ranks] += seconds
        sums = max(last.values(), default=0.0)
        return Once(max(update, *copies), measure, sums, accumulate, dict(wires), dict(once))

    def gathers(self, layout: Layout, runs: Runs, r: int, pp_rank: int) -> Mapping[_Ranks, Seconds]:
        """Seconds of all-gathers of a rank in a step, on each stream."""
        units = self._gathered_units(layout, runs, pp_rank)
        return _sums(units, self._counts(layout, runs, r, units))

    def _gathered_units(self, layout: Layout, runs: Runs, pp_rank: int) -> list[Gathered]:
        return [self._gathered(layout, unit, kind, pp_rank) for unit, kind in runs.kinds.items()]

    def _counts(self, layout: Layout, runs: Runs, r: int, units: Sequence[Gathered]) -> tuple[int, ...]:
        """How often a step gathers each of a rank's different units."""
        lay, read = layout, tuple([own.read for own in units])
        key = (runs, r, read, lay.schedule, lay.pp, lay.vpp, lay.reshard_after_step, lay.gradient_accumulation_steps)
        if (counts := self.counts.get(key)) is None:
            counts = self.counts[key] = self._count(lay, runs, r, read)
        return counts

    def _count(self, layout: Layout, runs: Runs, r: int, read: tuple[frozenset[str], ...]) -> tuple[int, ...]:
        lay, number = layout, {unit: i for i, unit in enumerate(runs.kinds)}
        ends, chunks = 0, list[tuple[tuple[int, int], ...]]()
        for chain in self.steps.composer.layers_of_rank(lay, r):
            own = runs.units[ends : (ends := ends + len(chain))]
            chunks.append(tuple([(number[run.unit], run.number) for run in own]))
        rank = RankOf(lay.schedule, lay.pp, lay.vpp, r, tuple(chunks), read, keeps=lay.reshard_after_step)
        return gathered(rank, lay.gradient_accumulation_steps)

    @tracked
    def _gathered(self, layout: Layout, unit: FsdpUnit, kind: LayerType, pp_rank: int) -> Gathered:
        """What gathering a unit takes."""
        composer, costs, wires = self.steps.composer, self.steps.bucket_costs, defaultdict[_Ranks, Seconds](float)
        read, cut = composer.layer_program(layout, kind).read_by, set[str]()
        for b in composer.bucket_planner.buckets_of(layout, unit, pp_rank):
            if b.cut_parameters:
                cut.update([p.name for p in b.params])
                if b.shards > 1:
                    wires[b.shard_ranks] += costs.on_wire("all_gather", b)
        return Gathered(frozenset([action for action, names in read.items() if cut & names]), tuple(wires.items()))

    # ---- a step ----------------------------------------------------------------------------------------------

    def _of_passes(self, layout: Layout, passes: Sequence[Passes], share: float) -> Seconds:
        """The bound from passes, each of which takes `share` times its seconds."""
        host = layout.gradient_accumulation_steps * max([p.host for p in passes])
        return max(host, *self._ends(layout, passes, share))

    def _ends(self, layout: Layout, passes: Sequence[Passes], share: float) -> list[Seconds]:
        """The bound from the passes of each pipeline rank, in the order in which a micro-batch reaches them: they begin
        when it is there, and the last gradient goes back to the first stage."""
        lay, m = layout, layout.gradient_accumulation_steps
        works, lates = [m * share * p.work for p in passes], [m * share * p.late for p in passes]
        there = back = 0.0
        ends: list[Seconds] = []
        group, border = self.steps.composer.assignment(lay).group, (*self._borders(lay), 0.0)
        for r, way in zip(lay.placement.reached, border, strict=True):
            g = group[r]
            late = back - lates[g]
            ends.append(there + works[g] + (late if late > 0 else 0.0))
            there, back = there + share * passes[g].on + way, back + share * passes[g].off + way
        return ends

    def _longest(
        self, layout: Layout, passes: Sequence[Passes], once: Sequence[Once],
        gathers: Mapping[int, Mapping[_Ranks, Seconds]],
    ) -> Seconds:  # fmt: skip
        """The largest bound of all ranks. The first micro-batch must reach a rank, the rank must compute all of them,
        gradients must be reduced after the last, and the last gradient must go back to the first stage. Beside its
        streams it computes more slowly."""
        lay, m = layout, layout.gradient_accumulation_steps
        reached, group, border = lay.placement.reached, self.steps.composer.assignment(lay).group, self._borders(lay)
        first, there, back, bound = once[reached[0]].update, 0.0, 0.0, 0.0
        sums = [(m * p.work, m * p.work if p.tail is None else p.tail, m * p.late, p.on, p.off) for p in passes]
        # Of equal ranks, what does not depend on their place is the same: the seconds of their busiest stream.
        busiest = dict[tuple[int, int, int], Seconds]()
        for i, r in enumerate(reached):
            g, own, wires = group[r], once[r], gathers.get(r, _NO_WIRES)
            work, tail, late, on, off = sums[g]
            key = (g, id(own), id(wires))
            if (wire := busiest.get(key)) is None:
                wire = busiest[key] = max(
                    [m * own.wires.get(w, 0.0) + wires.get(w, 0.0) for w in (*own.wires, *wires)], default=0.0
                )
                bound = max(bound, own.update + work - tail + own.sums + own.measure, m * passes[g].host, wire)
                for ranks, seconds in own.wires_once.items():
                    bound = max(bound, seconds + m * own.wires.get(ranks, 0.0) + wires.get(ranks, 0.0))
            begins = max(own.update, first + there)
            # Until its first micro-batch is there, and while its last gradient goes back, a rank computes nothing that
            # a busy stream would slow.
            idle = begins - own.update
            more = self._longer_by(m, passes[g], wire - idle, m * own.accumulate)
            bound = max(bound, begins + work + more + own.measure)
            more = 0.0 if late else self._longer_by(m, passes[g], wire - idle - back, 0.0)
            bound = max(bound, begins + work - late + more + back)
            if i + 1 < lay.pp:
                there, back = there + on + border[i], back + off + border[i]
        return bound

    def _longer_by(self, m: int, passes: Passes, wire: Seconds, accumulate: Seconds) -> Seconds:
        """What a rank needs longer than its `m` passes take alone: it computes more slowly beside a stream that is busy
        for `wire` seconds, or waits for it; and it accumulates gradients. Both may use up slack. Some of what it
        computes more slowly may be what passes lose beside their own collectives."""
        slower = 1 - 1 / self.steps.rates.contention  # of a collective's seconds, what overlapped compute loses
        lost = slower * max(0.0, wire - m * passes.waits) - m * passes.lost
        return max(0.0, accumulate + max(0.0, lost) - m * passes.slack)

    def _borders(self, layout: Layout) -> list[Seconds]:
        """Seconds of the messages that bring the first micro-batch to each rank after the first."""
        return [] if layout.pp == 1 else self._border_seconds(layout)

    @tracked
    def _border_seconds(self, layout: Layout) -> list[Seconds]:
        steps, placement = self.steps, layout.placement
        amount = steps.message_bytes(layout)
        kinds = ("send", "shift")  # alone, or while an equal one comes back, which a slow link may bring sooner
        spans = [GroupSpan(2, 1 + across) for across in (False, True)]
        seconds = [min([steps.rates.collective(kind, span, amount) for kind in kinds]) for span in spans]
        pairs = [(placement.locations[placement.stages[r][0] - 1][0], r) for r in placement.reached[1:]]
        return [seconds[steps.crosses_nodes(layout, a, b)] for a, b in pairs]


def _sums(units: Sequence[Gathered], counts: Sequence[int]) -> Mapping[_Ranks, Seconds]:
    """Seconds of these gathers, on each stream."""
    out: defaultdict[_Ranks, Seconds] = defaultdict(float)
    for own, n in zip(units, counts, strict=True):
        for ranks, seconds in own.wires:
            out[ranks] += n * seconds
    return out
