"""The time of a step: the program of every pipeline rank, played by the clock for two steps, and on until a step leaves
what it was left. The last is reported: it begins with what the one before has left under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.hardware import Cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.errors import Bug
from penteract.ops.declarations.fp8 import fp8_state_bytes, reads_quantised_weight
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket, bucket_of
from penteract.readings.buckets.planned import Runs, first_rank
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.layers.expert_load import Balanced
from penteract.readings.layers.layer_program import LayerProgram, LayerType
from penteract.readings.layers.reads import Memo, Memos, tracked
from penteract.readings.time.alone import alone
from penteract.readings.time.clock import PART, PS, ps
from penteract.readings.time.cost import BucketCosts, Cost, DeviceCosts
from penteract.readings.time.derive import Derived, derive
from penteract.readings.time.line import NumberedSchedule, begins_of, line_of
from penteract.readings.time.ops import DATA, ActionOps, Axes, BucketOps, Streams, piece_ops
from penteract.readings.time.rank_clock import Clock, Log
from penteract.readings.time.ranks import Ranks, Unsettled
from penteract.readings.time.stage import Stage
from penteract.schedule.actions import Compute
from penteract.schedule.in_flight import compute_lists
from penteract.schedule.registry import schedule_of
from penteract.step.agreements import after_backward, at_begin, totals
from penteract.step.ring_buffer import depth
from penteract.units import Bytes, Seconds

_STEPS = 64  # after which a step need not leave what it was left, if no later one differs in a digit that is told
_MOST = 4096  # that are played: an optimizer on the host, in buckets of a few KiB, has taken 208
_DIGITS = 10**4  # parts of a step that are not told apart
_TURNS = 4  # of a schedule that are played before others are jumped


class Ends(NamedTuple):
    """What decides a rank's work outside of the tape (`step/agreements.py`)."""

    model: ModelSpec
    rank: int
    widths: Widths
    buckets: Sequence[Bucket]
    quantised_weights: Sequence[Site]
    delayed: Sequence[Site]
    balanced: Sequence[str]


class PlayedStep(NamedTuple):
    """Seconds of a step, and those of each part (`ideal.PARTS`) on the rank that ends last."""

    seconds: Seconds
    parts: tuple[Seconds, ...]


@dataclass(slots=True)
class StepClock:
    """Plays steps of layouts of one model on one cluster."""

    composer: Composer
    cluster: Cluster
    rates: Rates
    jumps: bool = True
    log: Log | None = None  # of all that is played, where nothing is to be left out or remembered
    costs: Memo[Cost] = field(default_factory=Memo[Cost])
    spans: Memo[GroupSpan] = field(default_factory=Memo[GroupSpan])
    launches: dict[str, int] = field(default_factory=dict[str, int])
    memos: Memos = field(default_factory=Memos)
    derived: dict[tuple[Stage, int, object], Derived] = field(default_factory=dict[tuple[Stage, int, object], Derived])
    clocks: dict[tuple[int, ...], Clock] = field(default_factory=dict[tuple[int, ...], Clock])
    begun: dict[Layout, Ranks] = field(default_factory=dict[Layout, Ranks])  # of which one step is played

    def first(self, layout: Layout) -> Seconds:
        """From the beginning of a run to its first norm: a step takes no less, as it begins with more under way."""
        if layout not in self.begun:
            self.begun[layout] = self._begin(layout, _TURNS)
        return self.begun[layout].met[0] / PS

    def ranks(self, layout: Layout) -> Ranks:
        """Steps of all pipeline ranks, played until one leaves what it was left, nearly always two; or until all later
        ones are known to take as long, to the digits that are told. Raises Bug where neither comes."""
        ranks, turns = self.begun.pop(layout, None) or self._begin(layout, _TURNS), _TURNS
        while len(ranks.ends) < _MOST:
            try:
                ranks.step()
            except Unsettled:
                turns *= 2
                ranks = self._begin(layout, turns)
                continue
            if ranks.steady or (len(ranks.ends) > _STEPS and apart(ranks) * _DIGITS <= ranks.last):
                return ranks
        raise Bug("UNSTEADY", f"{_MOST} steps of a layout, and no two alike", found=layout,
                  fix="report it; another layout may be timed (--fix)")  # fmt: skip

    def _begin(self, layout: Layout, turns: int) -> Ranks:
        """With one step played."""
        while True:
            ranks = self.build(layout, turns if self.jumps else 0)
            try:
                ranks.step()
            except Unsettled:
                turns *= 2
            else:
                return ranks

    def seconds(self, layout: Layout) -> Seconds:
        """Of a step."""
        return self.step(layout).seconds

    def step(self, layout: Layout) -> PlayedStep:
        """A step mid-run."""
        ranks = self.ranks(layout)
        last = ranks.slowest
        told = ranks.machines[last].parts(ranks.spent_at_end[-2][last])
        told[PART["pipeline"]] += ranks.last - sum(told)  # what it waits for other ranks outside of actions
        return PlayedStep(ranks.last / PS, tuple([n / PS for n in told]))

    # ---- the program -----------------------------------------------------------------------------------------

    def build(self, layout: Layout, turns: int) -> Ranks:
        """The ranks of a layout before their first step; `turns`: how many the schedule keeps beside those it leaves
        out; 0: all are played."""
        lay = layout
        micros, skipped = _shortened(lay, turns)
        line = line_of(lay.schedule, lay.pp, lay.vpp, micros)
        stages = self.stages(lay)
        derived = [self._derived(lay, micros, stage, r) for r, stage in enumerate(stages)]
        return Ranks(line, stages, derived, self._wires(lay, line), ps(self.rates.launch), skipped, self.jumps)

    def _derived(self, layout: Layout, micros: int, stage: Stage, r: int) -> Derived:
        what = (layout.schedule, layout.pp, layout.vpp, micros)
        if (stage, r, what) not in self.derived:
            own = [a for a in compute_lists(*what)[r] if isinstance(a, Compute)]
            self.derived[stage, r, what] = derive(stage, own)
        return self.derived[stage, r, what]

    def alone(self, layout: Layout, r: int, arrives: Seconds, back: Seconds) -> Seconds:
        """What a step takes at least, from pipeline rank `r` alone: its first micro-batch `arrives` so late after all
        know the norm, and its last gradient must go `back`."""
        lay, runs = layout, self.composer.packer.groups(layout)
        micros, skipped = _shortened(lay, _TURNS)
        group = self.composer.assignment(lay).group[r]
        stage = self.stage(lay, runs.runs[group], runs.ranks[group][0] if self.alike(lay) else r)
        turns = begins_of(lay.schedule, lay.pp, lay.vpp, micros, r)
        last = 0 if lay.split_backward else ps(back)  # there, that gradient has gone before
        return alone(stage, self._derived(lay, micros, stage, r), turns, skipped, ps(arrives), last) / PS

    def stages(self, layout: Layout) -> list[Stage]:
        """The program of each pipeline rank; ranks with the same units, which lie on nodes alike, have one object."""
        alike, groups = self.alike(layout), self.composer.packer.groups(layout)
        found = list[Stage | None]([None] * layout.pp)
        for runs, ranks in zip(groups.runs, groups.ranks, strict=True):
            for r in ranks:
                found[r] = self.stage(layout, runs, ranks[0] if alike else r)
        return [stage for stage in found if stage]

    def wire(self, layout: Layout, source: int, target: int, *, both: bool = False) -> Seconds:
        """Seconds of a message between two stages; `both`: as much goes the other way meanwhile."""
        span = GroupSpan(2, 1 + self.across(layout, source, target))
        return self.rates.collective("shift" if both else "send", span, self.message(layout))

    def across(self, layout: Layout, one: int, other: int) -> bool:
        """Whether some rank of a stage lies on another node than its neighbour of another stage."""
        node, each = self.cluster.gpus_per_node, layout.world // layout.pp
        first, last = min(one, other) * each, (max(one, other) + 1) * each - 1
        return one != other and first // node != last // node

    def message(self, layout: Layout) -> Bytes:
        """Of a border between two stages."""
        rows = self.composer.sequence_length // layout.cp // layout.tp * layout.micro_batch_size
        return rows * self.composer.model.hidden_size * self.composer.widths["compute"]

    def _wires(self, layout: Layout, line: NumberedSchedule) -> list[int]:
        """Of each message."""
        known, out = dict[tuple[int, int, bool], int](), list[int]()
        for m in line.messages:
            way = (m.source, m.target, m.both)
            if way not in known:
                known[way] = ps(self.wire(layout, m.source, m.target, both=m.both))
            out.append(known[way])
        return out

    def alike(self, layout: Layout) -> bool:
        """Whether all stages lie on nodes alike."""
        node, each = self.cluster.gpus_per_node, layout.world // layout.pp
        return each % node == 0 or node % each == 0

    @property
    def bucket_costs(self) -> BucketCosts:
        """What gives the seconds of collectives and updates of buckets on this cluster."""
        return BucketCosts(self.rates, self.composer.policy, self.cluster.gpus_per_node)

    def device(self, layout: Layout) -> DeviceCosts:
        """What a rank's passes run on."""
        load, node = Balanced.of(self.composer.model, layout, self.composer.sequence_length), self.cluster.gpus_per_node
        return DeviceCosts(self.rates, self.composer.widths, Mesh(layout), node, load, self.costs, self.spans)

    @tracked
    def stage(self, layout: Layout, runs: Runs, r: int) -> Stage:
        """The program of pipeline coordinate `r`, which has these units. Layouts that show the same have one object."""
        lay, mesh = layout, Mesh(layout)
        rank, packer = first_rank(mesh, r), self.composer.packer
        streams, placed, bucket_plans = Streams(mesh, rank), packer.placed(lay, r), tuple(packer.bucket_plans(lay, r))
        pieces = dict[LayerType, tuple[LayerProgram, Mapping[str, ActionOps]]]()
        for kind in dict.fromkeys(run.kind for run in runs.units):
            piece = self.composer.piece(lay, kind)
            pieces[kind] = piece, self.piece_ops(lay, piece, streams.axes)
        known = dict[object, Bucket]()
        buckets = list[Bucket]()
        for plan in bucket_plans:
            key = (plan.key, plan.elements, plan.unit < 0, plan.shapes)
            if key not in known:
                known[key] = bucket_of(plan, mesh, rank)
            buckets.append(known[key])
        ops = BucketOps(buckets, self.bucket_costs, streams)
        ends, chunks = 0, list[range]()
        for chain in self.composer.chains_of(lay, r):
            chunks.append(range(ends, ends := ends + sum(n for _, n in chain)))
        row = [kind for kind, _ in placed]
        outside = self._ends(rank, row, pieces, buckets)
        for b in known.values():
            _streams(ops, b)
        for agreement in (*at_begin(outside, counted=True), *after_backward(outside), totals(outside)):
            if len(group := mesh.group(agreement.axis, rank)) > 1:
                streams.of(group, PART["update"])
        return Stage(self._clock(tuple(streams.parts)), ops, row, chunks, pieces, bucket_plans, buckets,
                     [params for _, params in placed], depth(lay, len(row)), outside, bool(lay.offload))  # fmt: skip

    @tracked
    def piece_ops(self, layout: Layout, piece: LayerProgram, axes: Axes) -> Mapping[str, ActionOps]:
        """Of each action of a piece, where the tape's axes have these streams."""
        return piece_ops(piece, self.device(layout), axes)

    def launched(self, name: str) -> int:
        """Picoseconds of the host for a part of a step."""
        if name not in self.launches:
            self.launches[name] = ps(self.rates.launched(name))
        return self.launches[name]

    def _clock(self, owner: tuple[int, ...]) -> Clock:
        """For ranks with these streams."""
        if owner not in self.clocks:
            slower = round((self.rates.beside - 1) * 10**6)
            self.clocks[owner] = Clock(
                self.launched, slower, owner, jumps=self.jumps, remembers=self.log is None, log=self.log
            )  # fmt: skip
        return self.clocks[owner]

    def _ends(
        self, rank: int, row: Sequence[LayerType], pieces: Mapping[LayerType, tuple[LayerProgram, object]],
        buckets: Sequence[Bucket],
    ) -> Ends:  # fmt: skip
        """What decides a rank's work outside of the tape."""
        asked = self.composer.policy.fp8 is not None or self.composer.model.moe is not None
        sites = [site for kind in row for site in pieces[kind][0].sites] if asked else []
        kept = [site for site in sites if fp8_state_bytes(site)]
        quantised_weights, delayed = (
            [s for s in kept if reads_quantised_weight(s)],
            [s for s in kept if not reads_quantised_weight(s)],
        )
        balanced = [str(s.attrs["name"]) for s in sites if s.op_name == "tokens_per_expert"]
        model, widths = self.composer.model, self.composer.widths
        return Ends(model, rank, widths, buckets, quantised_weights, delayed, balanced)


def apart(ranks: Ranks) -> int:
    """Picoseconds by which no later step differs from the last one by more.

    Of all moments that a step leaves to the next, `gains` are how much later each is than a step before. From moments
    that are all later by so much, a step leaves moments later by so much; and from later ones no earlier ones. So a
    step's gains lie between the least and the most of the step before, and so does what it takes.
    """
    gains = list[int]()
    for was, now in zip(ranks.left[-2], ranks.left[-1], strict=True):
        (early, host, *streams, flights), (early_now, host_now, *streams_now, flights_now) = was, now
        if streams != streams_now or [b for b, _ in flights] != [b for b, _ in flights_now]:
            return ranks.last  # what is under way is another: nothing is known
        gain = ranks.last + early - early_now
        gains += [
            gain,
            gain + host_now - host,
            *(gain + b - a for (_, a), (_, b) in zip(flights, flights_now, strict=True)),
        ]
    return max(gains) - min(gains)


def _streams(ops: BucketOps, b: Bucket) -> None:
    """Of all that a bucket is moved over, so that a clock knows every stream of its ranks."""
    for ranks in (b.shard_ranks, b.replicate_ranks, b.peers):
        if len(ranks) > 1:
            ops.streams.of(ranks, DATA)


def _shortened(layout: Layout, turns: int) -> tuple[int, int]:
    """Micro-batches that are played, and turns that are jumped: a multiple of four, as rings and uneven ranks may
    need a few turns to come round. Where all goes forward before anything goes back, a turn is of one half alone."""
    lay, m, schedule = layout, layout.gradient_accumulation_steps, schedule_of(layout.schedule)
    turn = schedule.turn(lay.pp, lay.vpp)
    spare = (m - schedule.steady_after(lay.pp, lay.vpp) - lay.pp) // turn - turns
    if not turns or not schedule.alternates or spare < 4:
        return m, 0
    return m - spare // 4 * 4 * turn, spare // 4 * 4
