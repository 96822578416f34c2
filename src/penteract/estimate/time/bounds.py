"""Lower bounds of a step's time, from sums alone: what a search needs before it plays a step.

Every op of the clock is monotone: from a later state, or with more ops between, nothing ends sooner. So an action of a
piece that is played with nothing under way, nothing that happens to buckets and a host far ahead takes no longer than
in any step; a stream is busy for all that it carries; and a host launches every call. A step is counted from when all
ranks know the gradient's norm to when they know the next one: on each rank an update, then its micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import fsum
from typing import NamedTuple

from penteract.estimate.packed import Groups, Runs
from penteract.estimate.pieces import Kind, Piece
from penteract.estimate.price import away
from penteract.estimate.reads import Memos, changed, tracked
from penteract.estimate.time.clock import FIRST, LONG, PS, play
from penteract.estimate.time.cost import BucketCosts
from penteract.estimate.time.ops import AXES, ActionOps
from penteract.estimate.time.step import StepClock
from penteract.ops.offload import COPIES
from penteract.parallel.data import Bucket
from penteract.schedule.actions import Compute
from penteract.schedule.in_flight import action_lists, steady
from penteract.spec.layout import Layout
from penteract.spec.schedules import ScheduleName
from penteract.step.ring import PLACES
from penteract.units import Seconds

_READ = ("Fwd", "Bwd", "Inp")  # actions that read parameters
_APART = tuple(range(FIRST, FIRST + len(AXES)))  # every axis on a stream of its own
_Ranks = tuple[int, ...]
Pass = Mapping[str, Seconds]  # of one micro-batch through a chunk, by action


class Idle(NamedTuple):
    """An action that is played from idle: its seconds, and the calls that the host launches."""

    seconds: Seconds
    calls: int


class Passes(NamedTuple):
    """Of ranks with the same stages: each chunk's passes, and the calls of a micro-batch through all of them."""

    chunks: tuple[Pass, ...]
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
            Passes(tuple([{a: share * s for a, s in chunk.items()} for chunk in chunks]), calls)
            for chunks, calls in self._best.passes(at)
        ]
        return self._longest(layout, passes, [_NOTHING] * layout.pp)

    # ---- passes ----------------------------------------------------------------------------------------------

    @tracked
    def passes(self, layout: Layout) -> list[Passes]:
        """By group of pipeline ranks with the same stages."""
        deal = self.steps.composer.deal(layout)
        idle = {kind: self._idle(layout, self.steps.composer.piece(layout, kind)) for kind in deal.kinds}
        each = list[tuple[Pass, int]]()
        for chain in deal.chains:
            total, calls = defaultdict[str, Seconds](float), 0
            for kind, n in chain:
                for action, (seconds, launched) in idle[kind].items():
                    total[action] += n * seconds
                    calls += n * launched
            each.append((dict(total), calls))
        return [Passes(tuple([p for p, _ in own]), sum([n for _, n in own])) for own in deal.dealt(each)]

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
            for ranks, seconds, always in self._gathers(layout, runs, r, stage):
                (once if always else wires)[ranks] += seconds
        for ranks, seconds in last.items():
            once[ranks] += seconds
        return Once(max(update, *copies), measure, max(last.values(), default=0.0), beside, dict(wires), dict(once))

    def _gathers(self, layout: Layout, runs: Runs, r: int, stage: int) -> Iterator[tuple[_Ranks, Seconds, bool]]:
        """Seconds of gathers on each wire, in each micro-batch or (True) in a step. An action finds at most as many of
        its units gathered already as the ring has places."""
        composer, costs = self.steps.composer, self.steps.bucket_costs
        buckets, at = composer.packer.unit_buckets(layout, runs, stage), 0
        for chain in composer.chains_of(layout, r):
            own = list(zip(runs.units[at : at + len(chain)], buckets[at : at + len(chain)], strict=True))
            at += len(chain)
            told = [(run.number, _on_wires(some, costs)) for run, some in own]
            if layout.keep_gathered:
                yield from ((ranks, n * s, True) for n, wires in told for ranks, s in wires.items())
                continue
            for action in _READ:
                read = [(n, wires) for (run, some), (n, wires) in zip(own, told, strict=True)
                        if self._reads(layout, run.kind, action, some)]  # fmt: skip
                yield from ((ranks, seconds, False) for ranks, seconds in _needed(read))

    def _reads(self, layout: Layout, kind: Kind, action: str, some: Sequence[Bucket]) -> bool:
        """Whether an action of a piece reads parameters that are cut."""
        names = self.steps.composer.piece(layout, kind).read_by.get(action, frozenset())
        return any(p.name in names for b in some if b.cut_parameters for p in b.params)

    # ---- a step ----------------------------------------------------------------------------------------------

    def _longest(self, layout: Layout, passes: Sequence[Passes], once: Sequence[Once]) -> Seconds:
        """The first micro-batch must come to a rank, all must be worked on there, gradients must be summed after the
        last, and the last gradient must go back to the first stage."""
        lay, launch = layout, self.steps.rates.launch
        m, group = lay.gradient_accumulation_steps, self.steps.composer.deal(lay).group
        tails = _tails(lay.schedule, lay.pp, lay.vpp, _enough(lay))
        first, there, back, bound = once[0].update, 0.0, 0.0, 0.0
        for r, g in enumerate(group):
            (chunks, calls), own = passes[g], once[r]
            work = m * fsum([s for chunk in chunks for s in chunk.values()])
            tail = fsum([n * chunks[chunk][kind] for (kind, chunk), n in tails[r]])
            late = m * fsum([chunk.get("Wgt", 0.0) for chunk in chunks])  # may wait until the gradient has gone on
            end = max(work + m * own.beside, work - tail + own.sums) + own.measure
            busy = max([m * s + own.wires_once.get(w, 0.0) for w, s in own.wires.items()], default=0.0)
            bound = max(bound, max(own.update, first + there) + end, first + there + work - late + back, busy,
                        max(own.wires_once.values(), default=0.0), m * calls * launch)  # fmt: skip
            if r + 1 < lay.pp:
                wire = self.steps.wire(lay, r, r + 1)
                there += chunks[0]["Fwd"] + wire
                back += chunks[0].get("Bwd", 0.0) + chunks[0].get("Inp", 0.0) + wire
        return bound


def _from_idle(ops: ActionOps) -> Idle:
    """Nothing under way, and the host far ahead. Copies that neighbours make are theirs."""
    calls = [op for some in ops.own for op in some]
    played = play(calls, [0] * (FIRST + len(AXES)), {}, -LONG, 0, 0, (0,) * (FIRST + len(AXES)))
    return Idle(played.done / PS, len(calls))


def _on_wires(some: Sequence[Bucket], costs: BucketCosts) -> Mapping[_Ranks, Seconds]:
    """Of gathering a unit."""
    out = defaultdict[_Ranks, Seconds](float)
    for b in some:
        if b.cut_parameters and b.shards > 1:
            out[b.sharers] += costs.on_wire("all_gather", b)
    return out


def _needed(units: Sequence[tuple[int, Mapping[_Ranks, Seconds]]]) -> Iterator[tuple[_Ranks, Seconds]]:
    """Of units and how many there are of each: all but the largest that a ring holds."""
    for ranks in {ranks for _, wires in units for ranks in wires}:
        each = [(wires.get(ranks, 0.0), n) for n, wires in units]
        there = sorted([s for s, n in each for _ in range(min(n, PLACES))])[-PLACES:]
        yield ranks, max(0.0, fsum([n * s for s, n in each]) - fsum(there))


def _enough(layout: Layout) -> int:
    """Micro-batches after which a schedule's end is the same however many there are."""
    lay = layout
    least = 2 * steady(lay.pp, lay.vpp) + lay.pp
    m = lay.gradient_accumulation_steps
    return m if m <= least + lay.pp else least + (m - least) % lay.pp


@cache
def _tails(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> list[tuple[tuple[tuple[str, int], int], ...]]:
    """Of each rank: how often it does each kind of action of a chunk from where the first gradient may be complete."""
    out = list[tuple[tuple[tuple[str, int], int], ...]]()
    for actions in action_lists(schedule, pp, vpp, micros):
        own = [(a.kind, a.chunk) for a in actions if isinstance(a, Compute)]
        last = {walk: i for i, walk in enumerate(own)}
        begin = min(i for (kind, _), i in last.items() if kind != "Fwd")
        out.append(tuple(Counter(own[begin:]).items()))
    return out
