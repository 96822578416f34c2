"""Lower bounds of a step's time, from sums alone: what a search needs before it plays a step.

Every op of the clock is monotone: from a later state, or with more ops between, nothing ends sooner. So an action of a
piece that is played with nothing under way, nothing that happens to buckets and a host far ahead takes no longer than
in any step; a stream is busy for all that it carries; and a host launches every call. A step is counted from when all
ranks know the gradient's norm to when they know the next one: on each rank an update, then its micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from penteract.estimate.packed import Groups, Runs
from penteract.estimate.pieces import Kind, Piece
from penteract.estimate.price import away
from penteract.estimate.rates import Span
from penteract.estimate.reads import Memos, changed, tracked
from penteract.estimate.time.clock import FIRST, LONG, PS, RUN, play
from penteract.estimate.time.ops import AXES, ActionOps
from penteract.estimate.time.step import StepClock
from penteract.ops.offload import COPIES
from penteract.parallel.data import Unit
from penteract.spec.layout import Layout
from penteract.step.ring import PLACES
from penteract.units import Seconds

_READ = ("Fwd", "Bwd", "Inp")  # actions that read parameters
_APART = tuple(range(FIRST, FIRST + len(AXES)))  # every axis on a stream of its own
_Ranks = tuple[int, ...]
Pass = Mapping[str, Seconds]  # of one micro-batch through a chunk, by action


class Idle(NamedTuple):
    """An action that is played from idle: its seconds, those of them that it waits, and the calls of the host."""

    seconds: Seconds
    waits: Seconds
    calls: int


class Passes(NamedTuple):
    """Of ranks with the same stages: each chunk's passes, and the waits and calls of a micro-batch in all of them."""

    chunks: tuple[Pass, ...]
    waits: Seconds
    calls: int


class Once(NamedTuple):
    """What happens to a rank's buckets, in seconds.

    update   of all of them, after the norm is known; `measure`: of their squares, before it is
    sums     on the busiest wire, of gradients that gather all micro-batches: none begins before the last of them
    beside   of compute in each micro-batch, where gradients are cut; `wires`: in each micro-batch on each wire
    wires_once  on each wire in a step
    """

    update: Seconds
    measure: Seconds
    sums: Seconds
    beside: Seconds
    wires: Mapping[_Ranks, Seconds]
    wires_once: Mapping[_Ranks, Seconds]


_NOTHING = Once(0.0, 0.0, 0.0, 0.0, {}, {})


@dataclass(slots=True)
class Bounds:
    """Of steps that a clock plays. What two layouts share is summed once."""

    steps: StepClock
    memos: Memos = field(default_factory=Memos)
    _best: Bounds | None = None

    def of(self, layout: Layout) -> Seconds:
        """Of a layout's step."""
        groups = self.steps.composer.packer.groups(layout)
        return self._longest(layout, self.passes(layout), self._once_of(layout, groups))

    def at_least(self, layout: Layout) -> Seconds:
        """From its passes alone, whatever happens to state and gradients."""
        passes = self.passes(layout)
        return self._longest(layout, passes, [_NOTHING] * layout.pp)

    def roughly(self, layout: Layout, largest: int) -> Seconds:
        """The same, lower, for any micro-batch of up to `largest` sequences from one look at that size.

        At the best rates the seconds of a call fall for each sequence as micro-batches grow, and so do those of a pass,
        as the clock is monotone. A loss in one chunk is no dearer than one in many.
        """
        if self._best is None:
            steps = self.steps
            self._best = Bounds(StepClock(steps.composer, steps.cluster, steps.rates.at_best()))
        chunk = self.steps.composer.sequence_length * largest if layout.loss == "chunked" else 0
        at, share = changed(layout, micro_batch_size=largest, loss_chunk=chunk), layout.micro_batch_size / largest
        passes = [
            Passes(tuple([{a: share * s for a, s in chunk.items()} for chunk in chunks]), waits, calls)
            for chunks, waits, calls in self._best.passes(at)
        ]
        return self._longest(layout, passes, [_NOTHING] * layout.pp)

    # ---- passes ----------------------------------------------------------------------------------------------

    @tracked
    def passes(self, layout: Layout) -> list[Passes]:
        """By group of pipeline ranks with the same stages."""
        deal = self.steps.composer.deal(layout)
        idle = {kind: self._idle(layout, self.steps.composer.piece(layout, kind)) for kind in deal.kinds}
        each = list[tuple[Pass, Seconds, int]]()
        for chain in deal.chains:
            total, waits, calls = defaultdict[str, Seconds](float), 0.0, 0
            for kind, n in chain:
                for action, told in idle[kind].items():
                    total[action] += n * told.seconds
                    waits, calls = waits + n * told.waits, calls + n * told.calls
            each.append((dict(total), waits, calls))
        return [
            Passes(tuple([p for p, _, _ in own]), sum([w for _, w, _ in own]), sum([n for _, _, n in own]))
            for own in deal.dealt(each)
        ]

    @tracked
    def _idle(self, layout: Layout, piece: Piece) -> Mapping[str, Idle]:
        return {name: _from_idle(ops) for name, ops in self.steps.piece_ops(layout, piece, _APART).items()}

    # ---- buckets ---------------------------------------------------------------------------------------------

    @tracked
    def _once_of(self, layout: Layout, groups: Groups) -> list[Once]:
        """Of each pipeline rank."""
        out = [_NOTHING] * layout.pp
        for runs, ranks in zip(groups.runs, groups.ranks, strict=True):
            for r in ranks:
                out[r] = self._once(layout, runs, r if self._unlike(layout, runs) else ranks[0])
        return out

    def _unlike(self, layout: Layout, runs: Runs) -> bool:
        return not self.steps.alike(layout) or self.steps.composer.packer.shares(runs)

    @tracked
    def _once(self, layout: Layout, runs: Runs, r: int) -> Once:
        packer, costs = self.steps.composer.packer, self.steps.bucket_costs
        stage = r if self._unlike(layout, runs) else 0
        update = measure = beside = 0.0
        copies, last = [0.0, 0.0], defaultdict[_Ranks, Seconds](float)
        wires, once = defaultdict[_Ranks, Seconds](float), defaultdict[_Ranks, Seconds](float)
        for pack, n in packer.counted(layout, runs, stage):
            b = packer.bucket(layout, pack, stage)
            update, measure = update + n * costs.update(b), measure + n * costs.squares(b)
            for i, word in enumerate(COPIES):
                copies[i] += n * costs.rates.copy(word, away(b, costs.policy))
            if b.cut_gradients:
                beside += n * costs.landed(b)
            if b.shards > 1:
                (wires if b.cut_gradients else last)[b.sharers] += n * costs.on_wire("reduce_scatter", b)
                once[b.sharers] += n * costs.on_wire("all_gather", b) if not b.cut_parameters else 0.0
            if len(b.replicas) > 1:
                last[b.replicas] += n * costs.on_wire("all_reduce", b)
        if layout.cuts_units:
            for ranks, seconds in self._gathers(layout, runs, r, stage).items():
                (once if layout.keep_gathered else wires)[ranks] += seconds
        for ranks, seconds in last.items():
            once[ranks] += seconds
        return Once(max(update, *copies), measure, max(last.values(), default=0.0), beside, dict(wires), dict(once))

    def _gathers(self, layout: Layout, runs: Runs, r: int, stage: int) -> Mapping[_Ranks, Seconds]:
        """Seconds of gathers on each wire, in each micro-batch; or in a step, where they stay. An action finds at most
        as many of its units gathered already as the ring has places."""
        out, largest, chunks = defaultdict[_Ranks, Seconds](float), dict[_Ranks, Seconds](), layout.vpp
        number, first = Counter[Unit](), dict[Unit, Kind]()
        for run in runs.units:
            number[run.unit] += run.number
            first.setdefault(run.unit, run.kind)
        for unit, n in number.items():
            turns = 1 if layout.keep_gathered else self._readings(layout, unit, first[unit], stage)
            for ranks, seconds in self._unit_wires(layout, unit, stage).items():
                out[ranks] += n * turns * seconds
                largest[ranks] = max(largest.get(ranks, 0.0), seconds)
        if layout.keep_gathered:
            return out
        return {ranks: max(0.0, s - 2 * chunks * PLACES * largest[ranks]) for ranks, s in out.items()}

    @tracked
    def _unit_wires(self, layout: Layout, unit: Unit, stage: int) -> Mapping[_Ranks, Seconds]:
        """Of gathering a unit."""
        packer, costs, out = self.steps.composer.packer, self.steps.bucket_costs, defaultdict[_Ranks, Seconds](float)
        for b in packer.buckets_of(layout, unit, stage):
            if b.cut_parameters and b.shards > 1:
                out[b.sharers] += costs.on_wire("all_gather", b)
        return dict(out)

    @tracked
    def _readings(self, layout: Layout, unit: Unit, kind: Kind, stage: int) -> int:
        """In how many actions of a micro-batch parameters that are cut are read."""
        buckets, read = (
            self.steps.composer.packer.buckets_of(layout, unit, stage),
            self.steps.composer.piece(layout, kind).read_by,
        )
        cut = {p.name for b in buckets if b.cut_parameters for p in b.params}
        return sum([bool(cut & read.get(action, frozenset())) for action in _READ])

    # ---- a step ----------------------------------------------------------------------------------------------

    def _longest(self, layout: Layout, passes: Sequence[Passes], once: Sequence[Once]) -> Seconds:
        """The first micro-batch must come to a rank, all must be worked on there, gradients must be summed after the
        last, and the last gradient must go back to the first stage."""
        lay, launch, m = layout, self.steps.rates.launch, layout.gradient_accumulation_steps
        slower = 1 - 1 / self.steps.rates.beside  # of a wire's seconds, what computations beside it lose
        first, there, back, bound, wires = once[0].update, 0.0, 0.0, 0.0, self._borders(lay)
        told = [_of_group(p, m) for p in passes]
        for r, g in enumerate(self.steps.composer.deal(lay).group):
            (work, tail, late, on, off), own = told[g], once[r]
            wire = m * max(own.wires.values()) if own.wires else 0.0
            lost = slower * max(0.0, wire - m * passes[g].waits)  # while a rank waits, it loses nothing
            end = max(work + m * own.beside + lost, work - tail + own.sums) + own.measure
            bound = max(bound, own.update + end, first + there + work + own.measure, first + there + work - late + back,
                        m * passes[g].calls * launch)  # fmt: skip
            for ranks, seconds in own.wires_once.items():
                bound = max(bound, seconds + m * own.wires.get(ranks, 0.0))
            bound = max(bound, wire)
            if r + 1 < lay.pp:
                there, back = there + on + wires[r], back + off + wires[r]
        return bound

    def _borders(self, layout: Layout) -> list[Seconds]:
        """Of a message from each stage to the next."""
        lay, node, each = layout, self.steps.cluster.gpus_per_node, layout.world // layout.pp
        if lay.pp == 1:
            return []
        amount = self.steps.message(lay)
        known = [self.steps.rates.collective("send", Span(2, 1 + across), amount) for across in (False, True)]
        return [known[r * each // node != ((r + 2) * each - 1) // node] for r in range(lay.pp - 1)]


class _Group(NamedTuple):
    """Of a rank's passes: seconds of all micro-batches; from where gradients may be complete at first; of weight
    gradients, which may wait until the gradient has gone on; and of the first chunk, on the way there and back."""

    work: Seconds
    tail: Seconds
    late: Seconds
    on: Seconds
    off: Seconds


def _of_group(passes: Passes, micros: int) -> _Group:
    chunks = passes.chunks
    every = [s for chunk in chunks for s in chunk.values()]
    work, late = micros * fsum(every), micros * fsum([chunk.get("Wgt", 0.0) for chunk in chunks])
    # Of several chunks, or a backward in two halves, some gradients are complete long before the end.
    tail = chunks[0].get("Bwd", work) if len(chunks) == 1 else work
    return _Group(work, tail, late, chunks[0]["Fwd"], chunks[0].get("Bwd", 0.0) + chunks[0].get("Inp", 0.0))


def _from_idle(ops: ActionOps) -> Idle:
    """Nothing under way, and the host far ahead. Copies that neighbours make are theirs."""
    calls = [op for some in ops.own for op in some]
    played = play(calls, [0] * (FIRST + len(AXES)), {}, -LONG, 0, 0, (0,) * (FIRST + len(AXES)))
    worked = sum([op[1] for op in calls if op[0] == RUN])
    return Idle(played.done / PS, (played.done - worked) / PS, len(calls))
