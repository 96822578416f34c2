"""The time of a step: the clock simulates the programs of all pipeline ranks, step after step, until a step ends in
the state in which it began (nearly always the second). The last step is reported: it begins with the communication
that the step before has left in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.hardware import Cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.errors import Bug
from penteract.ops.declarations.quantised.fp8 import has_delayed_scales, reads_quantised_weight
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket, bucket_of
from penteract.readings.buckets.planned import Runs, first_rank
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.layers.layer_program import LayerProgram, LayerType
from penteract.readings.layers.reads import Memo, Memos, tracked
from penteract.readings.time.clock import MILLION, PART, PS, ps
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.cost import BucketCosts, CallCost, CallKey, DeviceCosts
from penteract.readings.time.derive import Derived, derive
from penteract.readings.time.numbered_schedule import NumberedSchedule, numbered_schedule, order_of, period_begins
from penteract.readings.time.one_rank_bound import alone
from penteract.readings.time.ops import DATA, ActionOps, Axes, BucketOps, Streams, layer_ops
from penteract.readings.time.passes_bound import ranks_of_passes
from penteract.readings.time.rank_clock import Clock, Log
from penteract.readings.time.ranks import Ranks, Unsettled
from penteract.schedule.registry import schedule_of
from penteract.step.all_reduces import after_backward, at_begin, totals
from penteract.step.ring_buffer import depth
from penteract.units import Bytes, Seconds

_SETTLED_AFTER = 64  # after so many, it is enough that no later step can differ in a reported digit
_MAX_STEPS = 4096  # steps simulated at most: an optimizer on the host, in buckets of a few KiB, has needed 208
_DIGITS = 10**4  # changes below 1/10⁴ of a step are not reported
_PERIODS = 4  # periods of a schedule that are simulated before others are skipped


class OutsideTapeInputs(NamedTuple):
    """The inputs of a rank's work outside of the tape (`OutsideTape` of `step/all_reduces.py`)."""

    model: ModelSpec
    rank: int
    widths: Widths
    buckets: Sequence[Bucket]
    quantised_weights: Sequence[Site]
    delayed_scaling: Sequence[Site]
    balanced: Sequence[str]


class SimulatedStep(NamedTuple):
    """Seconds of a step, and of each part (`ideal.PARTS`) on the rank that ends last."""

    seconds: Seconds
    parts: tuple[Seconds, ...]


@dataclass(slots=True)
class StepClock:
    """Simulates steps of layouts of one model on one cluster."""

    composer: Composer
    cluster: Cluster
    rates: Rates
    at_once: bool = False  # whether the host reads a step's outcome before it launches the next, as `Trainer.step` does
    skip_repeats: bool = True  # whether repeated states are skipped; otherwise all is simulated
    log: Log | None = None  # receives every simulated op; needs a clock that skips and caches nothing
    costs: dict[CallKey, CallCost] = field(default_factory=dict[CallKey, CallCost])
    spans: Memo[GroupSpan] = field(default_factory=Memo[GroupSpan])
    launches: dict[str, int] = field(default_factory=dict[str, int])
    memos: Memos = field(default_factory=Memos)
    derived: dict[tuple[ClockProgram, int, object], Derived] = field(
        default_factory=dict[tuple[ClockProgram, int, object], Derived]
    )
    clocks: dict[tuple[int, ...], Clock] = field(default_factory=dict[tuple[int, ...], Clock])
    after_first_step: dict[Layout, Ranks] = field(default_factory=dict[Layout, Ranks])  # after one simulated step

    def seconds(self, layout: Layout) -> Seconds:
        """Seconds of a steady-state step."""
        return self.step(layout).seconds

    def step(self, layout: Layout) -> SimulatedStep:
        """A steady-state step."""
        ranks = self.ranks(layout)
        last = ranks.slowest
        parts = ranks.rank_clocks[last].parts(ranks.spent_at_end[-2][last])
        parts[PART["pipeline"]] += ranks.last - sum(parts)  # waits for other ranks outside of actions
        return SimulatedStep(ranks.last / PS, tuple([n / PS for n in parts]))

    def ranks(self, layout: Layout) -> Ranks:
        """Simulate steps of all pipeline ranks until one ends in the state in which it began (nearly always two), or
        until all later ones provably take as long, to the reported digits. Raises Bug if neither happens."""
        ranks, periods = self.after_first_step.pop(layout, None) or self._begin(layout, _PERIODS), _PERIODS
        while len(ranks.ends) < _MAX_STEPS:
            try:
                ranks.step()
            except Unsettled:
                periods *= 2
                ranks = self._begin(layout, periods)
                continue
            if ranks.steady or (len(ranks.ends) > _SETTLED_AFTER and largest_change(ranks) * _DIGITS <= ranks.last):
                return ranks
        raise Bug("UNSTEADY", f"{_MAX_STEPS} steps of a layout, and no two alike", found=layout,
                  fix="report it; another layout may be timed (--fix)")  # fmt: skip

    def seconds_to_first_norm(self, layout: Layout) -> Seconds:
        """Seconds from the beginning of a run to its first gradient norm. No step takes less: later ones begin with
        communication in flight."""
        if layout not in self.after_first_step:
            self.after_first_step[layout] = self._begin(layout, _PERIODS)
        return self.after_first_step[layout].met[0] / PS

    def _begin(self, layout: Layout, periods: int) -> Ranks:
        """The ranks after one simulated step."""
        return self._first_step(lambda kept: self.build(layout, kept), periods)

    def _first_step(self, build: Callable[[int], Ranks], periods: int) -> Ranks:
        """The same of any ranks; `build` makes them, with so many periods of their schedule."""
        while True:
            ranks = build(periods if self.skip_repeats else 0)
            try:
                ranks.step()
            except Unsettled:
                periods *= 2
            else:
                return ranks

    def of_passes(
        self, layout: Layout, passes: Sequence[Sequence[Mapping[str, Seconds]]],
        early: Sequence[Sequence[Mapping[str, Seconds]]],
    ) -> Seconds:  # fmt: skip
        """A lower bound of the step time from passes and messages: the actions of each pipeline rank take these
        seconds, by chunk and kind. `early`: those of them that may come before a message."""

        def build(periods: int) -> Ranks:
            num_micro_batches, skipped = _shortened(layout, periods)
            line = numbered_schedule(layout.schedule, layout.pp, layout.vpp, num_micro_batches)
            return ranks_of_passes(line, passes, early, self._wires(layout, line), skipped)

        return self._first_step(build, _PERIODS).met[0] / PS

    def lower_bound(self, layout: Layout, r: int, arrives: Seconds, back: Seconds) -> Seconds:
        """A lower bound of the step time from pipeline rank `r` alone.

        `arrives`: seconds from when all ranks know the gradient norm until its first micro-batch can be there; `back`:
        seconds that its last gradient needs to go back to the first stage.
        """
        runs = self.composer.bucket_planner.groups(layout)
        num_micro_batches, skipped = _shortened(layout, _PERIODS)
        group = self.composer.assignment(layout).group[r]
        program = self.clock_program(
            layout, runs.runs[group], runs.ranks[group][0] if self.pp_ranks_aligned_to_nodes(layout) else r
        )
        starts = period_begins(layout.schedule, layout.pp, layout.vpp, num_micro_batches, r)
        last = 0 if layout.split_backward else ps(back)  # with a split backward, the gradient is sent before the end
        derived = self._derived(layout, num_micro_batches, program, r)
        return alone(program, derived, starts, skipped, ps(arrives), last) / PS

    # ---- the program ---------------------------------------------------------------------------------------

    def build(self, layout: Layout, periods: int) -> Ranks:
        """The ranks of a layout before their first step. `periods`: how many periods of the schedule are kept when
        others are left out; 0: none is left out."""
        num_micro_batches, skipped = _shortened(layout, periods)
        line = numbered_schedule(layout.schedule, layout.pp, layout.vpp, num_micro_batches)
        programs = self.programs(layout)
        derived = [self._derived(layout, num_micro_batches, program, r) for r, program in enumerate(programs)]
        return Ranks(
            line,
            programs,
            derived,
            self._wires(layout, line),
            ps(self.rates.launch),
            skipped,
            self.skip_repeats,
            self.at_once,
        )

    def _derived(self, layout: Layout, num_micro_batches: int, program: ClockProgram, r: int) -> Derived:
        schedule = (layout.schedule, layout.pp, layout.vpp, num_micro_batches)
        if (program, r, schedule) not in self.derived:
            self.derived[program, r, schedule] = derive(program, order_of(*schedule, r))
        return self.derived[program, r, schedule]

    def programs(self, layout: Layout) -> list[ClockProgram]:
        """The program of each pipeline rank. Ranks with the same units and the same position on nodes share one."""
        aligned, groups = self.pp_ranks_aligned_to_nodes(layout), self.composer.bucket_planner.groups(layout)
        found = list[ClockProgram | None]([None] * layout.pp)
        for runs, ranks in zip(groups.runs, groups.ranks, strict=True):
            for r in ranks:
                found[r] = self.clock_program(layout, runs, ranks[0] if aligned else r)
        return [program for program in found if program]

    @tracked
    def clock_program(self, layout: Layout, runs: Runs, r: int) -> ClockProgram:
        """The program of pipeline coordinate `r`, which has these units. Layouts with equal inputs share one object."""
        layer_start, chunks = 0, list[range]()
        for chain in self.composer.layers_of_rank(layout, r):
            chunks.append(range(layer_start, layer_start := layer_start + sum(n for _, n in chain)))
        return self._program(layout, runs, r, chunks)

    @tracked
    def chunk_program(self, layout: Layout, chunk: Runs, r: int) -> ClockProgram:
        """The same of a rank that has only the units of one of its model chunks."""
        return self._program(layout, chunk, r, [range(sum([run.number for run in chunk.units]))])

    def _program(self, layout: Layout, runs: Runs, r: int, chunks: Sequence[range]) -> ClockProgram:
        mesh = Mesh(layout)
        rank, bucket_planner = first_rank(mesh, r), self.composer.bucket_planner
        streams, packed = Streams(mesh, rank), bucket_planner.listed(layout, runs, r)
        layers: dict[LayerType, tuple[LayerProgram, Mapping[str, ActionOps]]] = {}
        for kind in dict.fromkeys(run.kind for run in runs.units):
            layer = self.composer.layer_program(layout, kind)
            layers[kind] = layer, self.layer_ops(layout, layer, streams.axes)
        distinct = {i: bucket_of(packed.plans[i], mesh, rank) for i in dict.fromkeys(packed.alike)}
        buckets = [distinct[i] for i in packed.alike]
        ops = BucketOps(buckets, self.bucket_costs, streams)
        layer_types = [run.kind for run in runs.units for _ in range(run.number)]
        outside = self._outside_tape_inputs(rank, layer_types, layers, buckets)
        for b in distinct.values():
            _open_streams(ops, b)
        for reduction in (*at_begin(outside, targets_counted=True), *after_backward(outside), totals(outside)):
            if len(group := mesh.group(reduction.axis, rank)) > 1:
                streams.of(group, PART["update"])
        places = depth(layout, len(layer_types))
        return ClockProgram(self._clock(tuple(streams.parts)), ops, layer_types, chunks, layers, packed, buckets,
                            places, outside, bool(layout.offload))  # fmt: skip

    def _outside_tape_inputs(
        self, rank: int, layer_types: Sequence[LayerType], layers: Mapping[LayerType, tuple[LayerProgram, object]],
        buckets: Sequence[Bucket],
    ) -> OutsideTapeInputs:  # fmt: skip
        """The inputs of a rank's work outside of the tape."""
        needed = self.composer.policy.fp8 is not None or self.composer.model.moe is not None
        sites = [site for kind in layer_types for site in layers[kind][0].sites] if needed else []
        quantised_weights = [s for s in sites if reads_quantised_weight(s)]
        delayed_scaling = [s for s in sites if has_delayed_scales(s)]
        balanced = [str(s.attrs["name"]) for s in sites if s.op_name == "tokens_per_expert"]
        model, widths = self.composer.model, self.composer.widths
        return OutsideTapeInputs(model, rank, widths, buckets, quantised_weights, delayed_scaling, balanced)

    @tracked
    def layer_ops(self, layout: Layout, layer: LayerProgram, axes: Axes) -> Mapping[str, ActionOps]:
        """The ops of each action of a layer. `axes`: the stream of each axis of the tape."""
        return layer_ops(layer, self.device(layout), axes)

    # ---- costs ---------------------------------------------------------------------------------------------

    def _wires(self, layout: Layout, line: NumberedSchedule) -> list[int]:
        """Picoseconds of each message."""
        took = [ps(self.message_seconds(layout, source, target, both=both)) for source, target, both in line.links]
        return [took[i] for i in line.link]

    def message_seconds(self, layout: Layout, source: int, target: int, *, both: bool = False) -> Seconds:
        """Seconds of a message between pipeline ranks; `both`: an equal one goes the other way at the same time."""
        span = GroupSpan(2, 1 + self.crosses_nodes(layout, source, target))
        return self.rates.collective("shift" if both else "send", span, self.message_bytes(layout))

    def message_bytes(self, layout: Layout) -> Bytes:
        """Bytes of a message: activations [S/(cp·tp), B, D] in the compute dtype."""
        rows = self.composer.sequence_length // layout.cp // layout.tp * layout.micro_batch_size
        return rows * self.composer.model.hidden_size * self.composer.widths["compute"]

    def crosses_nodes(self, layout: Layout, one: int, other: int) -> bool:
        """Whether some rank is on another node than its neighbour on the other pipeline rank."""
        node, each = self.cluster.gpus_per_node, layout.world // layout.pp
        first, last = min(one, other) * each, (max(one, other) + 1) * each - 1
        return one != other and first // node != last // node

    def pp_ranks_aligned_to_nodes(self, layout: Layout) -> bool:
        """Whether all pipeline ranks are placed on nodes in the same way."""
        node, each = self.cluster.gpus_per_node, layout.world // layout.pp
        return each % node == 0 or node % each == 0

    @property
    def bucket_costs(self) -> BucketCosts:
        """Seconds of collectives and updates of buckets on this cluster."""
        return BucketCosts(self.rates, self.composer.policy, self.cluster.gpus_per_node)

    def device(self, layout: Layout) -> DeviceCosts:
        """Seconds of the calls of a rank's passes."""
        load, node = self.composer.load(layout), self.cluster.gpus_per_node
        return DeviceCosts(
            self.rates, self.composer.widths, Mesh(layout), node, load, layout.adds_gradients, self.costs, self.spans
        )  # fmt: skip

    @property
    def slower(self) -> int:
        """Millionths by which a collective slows compute."""
        return round((self.rates.contention - 1) * MILLION)

    def launch_ps(self, name: str) -> int:
        """Picoseconds that the host needs to launch an op of this name."""
        if name not in self.launches:
            self.launches[name] = ps(self.rates.launched(name))
        return self.launches[name]

    def _clock(self, owner: tuple[int, ...]) -> Clock:
        """The clock of ranks with these streams."""
        if owner not in self.clocks:
            self.clocks[owner] = Clock(
                self.launch_ps, self.slower, owner, skip_repeats=self.skip_repeats, remembers=self.log is None,
                log=self.log,
            )  # fmt: skip
        return self.clocks[owner]


def largest_change(ranks: Ranks) -> int:
    """Picoseconds: the most by which any later step can differ from the last one.

    A step hands timestamps to the next one; `gains` are how much later each is than in the step before. Shifting all
    timestamps of a step's beginning shifts those of its end equally, and a later beginning never makes an earlier end.
    So all gains of a step, and its duration, lie between the least and the largest gain of the step before.
    """
    gains: list[int] = []
    for was, now in zip(ranks.carried[-2], ranks.carried[-1], strict=True):
        same = (was.streams, was.unit) == (now.streams, now.unit)
        if not same or [b for b, _ in was.in_flight] != [b for b, _ in now.in_flight]:
            return ranks.last  # other communication is in flight: no bound
        gain = ranks.last + was.early - now.early
        gains += [
            gain,
            gain + now.host - was.host,
            *(gain + b - a for (_, a), (_, b) in zip(was.in_flight, now.in_flight, strict=True)),
        ]
    return max(gains) - min(gains)


def _open_streams(ops: BucketOps, b: Bucket) -> None:
    """Open the streams of a bucket's collectives, so that a clock has every stream of its ranks."""
    for ranks in (b.shard_ranks, b.replicate_ranks, b.peers):
        if len(ranks) > 1:
            ops.streams.of(ranks, DATA)


def _shortened(layout: Layout, periods: int) -> tuple[int, int]:
    """How many micro-batches are simulated, and how many periods of the schedule are skipped: a multiple of four, as
    ring buffers and uneven ranks may repeat only after a few periods. None is skipped in a schedule that runs all
    forwards before the first backward, where a period is of one half only."""
    m, schedule = layout.gradient_accumulation_steps, schedule_of(layout.schedule)
    period = schedule.period(layout.pp, layout.vpp)
    spare = (m - schedule.steady_after(layout.pp, layout.vpp) - layout.pp) // period - periods
    if not periods or not schedule.alternates or spare < 4:
        return m, 0
    return m - spare // 4 * 4 * period, spare // 4 * 4
