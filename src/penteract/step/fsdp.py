"""Bucket events around the instructions of one action, given the state that earlier actions left.

Unsharded buckets are waited for at their first use and reduced after their last write. What ZeRO 2 and 3 shard is whole
only in ring buffers: parameters of a unit are gathered one unit before their use, and its gradients are reduced after
the action that wrote them.

A reduction that is due begins with the next backward pass of attention of its action, if one comes before its buffer is
needed again. A collective takes multiprocessors from the kernels beside it. Attention's many short blocks lose about
that share; a matrix product whose blocks all start at once may wait until the collective has ended.

The rule depends only on one action, the unit that is read next, and the ring buffers, so equal inputs give equal
events. `events.py` applies it to every action of a step; the simulated clock applies it once to each distinct action.

Zhao 2023 (2304.11277) §3.3 and §4: prefetching, and the limit on gathered units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from penteract.errors import Bug
from penteract.parallel.bucket_plans import NONE
from penteract.step.ring_buffer import DEPTH

Question = Literal["gather", "wait_all_gather", "acquire_gradient_buffer", "reduce", "wait_reduce_scatter", "replicate"]
Event = tuple[Question, int]  # a method of `Reading`, and the bucket
At = Any  # the position of an instruction in its action: any ordered type


class Touch(NamedTuple):
    """An instruction that reads parameters, or writes their gradients."""

    at: At
    buckets: tuple[int, ...]
    writes: bool
    names: tuple[str, ...] = ()


class UnitReads(NamedTuple):
    """What the rule needs of an action.

    reads      the units whose sharded parameters are read, in order, each with its first reader
    writes     for each bucket with sharded gradients: first writer, bucket, last writer; ordered by the first
    attention  backward passes of attention, in order
    reused     of each of `writes`: where another unit takes its entry in the ring buffer, or None
    """

    reads: Sequence[tuple[At, int]]
    writes: Sequence[tuple[At, int, At]]
    attention: Sequence[At]
    reused: Sequence[At | None]


class FsdpState(NamedTuple):
    """The state between two actions.

    there        the unit in each entry of the parameter ring buffer, or NONE
    gathering    units whose all-gather is in flight
    last_read    the unit that was read last
    leaving      for each entry of the gradient ring buffer: the buckets whose reduce-scatter is in flight, and whether
                 it is their last of the step
    replicating  the bucket whose all-reduce over replicas starts before the next reduction, or NONE
    """

    there: tuple[int, ...]
    gathering: frozenset[int] = frozenset()
    last_read: int = NONE
    leaving: tuple[tuple[tuple[int, bool], ...], ...] = ((),) * DEPTH
    replicating: int = NONE


@dataclass(slots=True)
class NumberedStates:
    """States by number: equal ones have one. A number is a small key, a state a large one."""

    states: list[FsdpState] = field(default_factory=list[FsdpState])
    numbers: dict[FsdpState, int] = field(default_factory=dict[FsdpState, int])

    def __getitem__(self, number: int) -> FsdpState:
        """The state of this number."""
        return self.states[number]

    def number(self, state: FsdpState) -> int:
        """The number of a state."""
        if (found := self.numbers.setdefault(state, len(self.states))) == len(self.states):
            self.states.append(state)
        return found


class Due(NamedTuple):
    """`needs`: buckets gathered after the update whose first read of the step is in this action, with its position.
    `sums`: buckets reduced once per step whose last write is in this action, with its position."""

    needs: Sequence[tuple[At, int]] = ()
    sums: Sequence[tuple[At, int]] = ()


class ShardedBucket(Protocol):
    """What the rule needs of a bucket: its unit, what is sharded, over how many ranks, and its replicas."""

    @property
    def unit(self) -> int:
        """The FSDP unit (embedding, layer or head) that it belongs to, numbered on the rank in forward order."""
        ...

    @property
    def cut_parameters(self) -> bool:
        """Whether parameters are sharded between uses, and gathered for each use (ZeRO 3)."""
        ...

    @property
    def cut_gradients(self) -> bool:
        """Whether gradients are sharded between actions: ZeRO 2 and 3 without `reduce_scatter_once`."""
        ...

    @property
    def shards(self) -> int:
        """The number of ranks that it is sharded over; 1: unsharded."""
        ...

    @property
    def replicate_ranks(self) -> tuple[int, ...]:
        """The ranks with the same shard, one in each shard group."""
        ...


@dataclass(slots=True)
class _Around:
    """Events of the current action."""

    before: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def due(self, at: At, attention: Sequence[At], until: At | None = None) -> list[Event]:
        """Where a reduction begins that is due after `at`: before the next of these passes of attention, if it comes
        before `until`."""
        i = bisect_right(attention, at)
        if i < len(attention) and (until is None or attention[i] < until):
            return self.before[attention[i]]
        return self.after[at]


Table = Mapping[At, Sequence[Event]]


@dataclass(slots=True)
class FsdpRule:
    """The rule for one rank's buckets. `depth`: entries of the ring buffer of parameters."""

    buckets: Sequence[ShardedBucket]
    depth: int
    cut: dict[int, list[int]] = field(init=False)  # unit -> its buckets with sharded parameters
    # unit -> the events that gather these buckets, and those that wait for them: many actions have the same
    gathers: dict[int, list[Event]] = field(init=False)
    waits: dict[int, list[Event]] = field(init=False)

    def __post_init__(self) -> None:
        """List the buckets of each unit whose parameters are sharded, and their events."""
        self.cut = defaultdict[int, list[int]](list)
        self.gathers, self.waits = defaultdict[int, list[Event]](list), defaultdict[int, list[Event]](list)
        for i, b in enumerate(self.buckets):
            if b.cut_parameters:
                self.cut[b.unit].append(i)
                self.gathers[b.unit].append(("gather", i))
                self.waits[b.unit].append(("wait_all_gather", i))

    def begin(self) -> FsdpState:
        """The state at the start of a step: nothing is gathered, since parameters have changed."""
        return FsdpState((NONE,) * self.depth)

    def unit_reads(self, touches: Iterable[Touch], attention: Sequence[At]) -> UnitReads:
        """Which units an action reads and which buckets it writes. `attention`: its backward passes of attention."""
        reads, buckets = list[tuple[At, int]](), self.buckets
        first: dict[int, At] = {}
        last: dict[int, At] = {}
        for at, own, writes, _ in touches:
            for b in own:
                unit = buckets[b].unit
                if writes and buckets[b].cut_gradients:
                    first.setdefault(b, at)
                    last[b] = at
                elif not writes and buckets[b].cut_parameters and (not reads or reads[-1][1] != unit):
                    reads.append((at, unit))
        writes = [(at, b, last[b]) for at, b in sorted((at, b) for b, at in first.items())]
        return UnitReads(reads, writes, attention, self.reused(writes))

    def reused(self, writes: Sequence[tuple[At, int, At]]) -> list[At | None]:
        """For each of these buckets: where another unit takes its entry, or None."""
        units = [self.buckets[b].unit for _, b, _ in writes]
        found, begins = list[At | None](), dict[int, tuple[int, At, At | None]]()
        for (at, _, _), unit in reversed(list(zip(writes, units, strict=True))):
            # The unit that holds the entry next, where it begins, and where the one after it does.
            held, begin, then = begins.get(unit % DEPTH, (NONE, None, None))
            over = then if held == unit else begin
            begins[unit % DEPTH] = unit, at, over
            found.append(over)
        return found[::-1]

    def action(
        self, left: FsdpState, passing: UnitReads, due: Due, following: int, last: Callable[[int], bool]
    ) -> tuple[Table, Table, FsdpState]:
        """-> events before and after instructions, and the new state.

        following  the unit that is read next after this action, or NONE
        last       bucket -> whether its last write of the step is in this action
        """
        around = _Around()
        there, gathering, last_read = self._gathers(around, left, passing.reads, following)
        for at, b in due.needs:
            around.before[at].append(("wait_all_gather", b))
        replicating = self._whole_sums(around, left.replicating, due.sums, passing.attention)
        leaving = self._cut_sums(around, left.leaving, passing, last)
        return around.before, around.after, FsdpState(there, gathering, last_read, leaving, replicating)

    def end(self, left: FsdpState, shared: Sequence[int], written: Callable[[int], At]) -> list[Event]:
        """After the last action: reductions of buckets that pipeline ranks share, and waits for reductions in flight.

        written  bucket -> its last write
        """
        events, waiting = list[Event](), left.replicating
        for b in shared:
            waiting = self._reduce(events, waiting, b)
        if waiting != NONE:
            events.append(("replicate", waiting))
        leaving = {b for some in left.leaving for b, _ in some}
        for b in sorted(leaving, key=lambda b: (written(b), b)):
            self._wait_reduce_scatter(events, b, last=True)
        return events

    # ---- parameters ------------------------------------------------------------------------------------------

    def _gathers(
        self, around: _Around, left: FsdpState, reads: Sequence[tuple[At, int]], following: int
    ) -> tuple[tuple[int, ...], frozenset[int], int]:
        """A unit is gathered one unit ahead, or at its own reads if the previous unit occupies its entry. A unit still
        in its entry is not gathered again."""
        if reads and reads[0][1] == left.last_read:
            reads = reads[1:]
        if not reads:
            return left.there, left.gathering, left.last_read
        there, gathering, n = list(left.there), set(left.gathering), self.depth
        upcoming = [*(unit for _, unit in reads[1:]), following]
        for (at, now), after in zip(reads, upcoming, strict=True):
            before = around.before[at]
            for unit in (now, after):
                free = unit == now or (unit != NONE and unit % n != now % n)
                if free and there[unit % n] != unit:
                    there[unit % n] = unit
                    gathering.add(unit)
                    before += self.gathers[unit]
            if now in gathering:
                gathering.remove(now)
                before += self.waits[now]
        return tuple(there), frozenset(gathering), reads[-1][1]

    # ---- gradients -------------------------------------------------------------------------------------------

    def _whole_sums(
        self, around: _Around, waiting: int, sums: Sequence[tuple[At, int]], attention: Sequence[At]
    ) -> int:
        """A bucket that is reduced once per step is reduced after its last write; over replicas, when the next one
        is."""
        for at, b in sorted(sums):
            waiting = self._reduce(around.due(at, attention), waiting, b)
        return waiting

    def _cut_sums(
        self,
        around: _Around,
        left: tuple[tuple[tuple[int, bool], ...], ...],
        passing: UnitReads,
        last: Callable[[int], bool],
    ) -> tuple[tuple[tuple[int, bool], ...], ...]:
        """A bucket with sharded gradients is whole only within one action, in the entry of its unit.

        Before another unit takes the entry, its earlier reduce-scatters must have finished.
        """
        if not (writes := passing.writes):
            return left
        leaving, tenant, closed = list(map(list, left)), [NONE] * DEPTH, {b: at for _, b, at in writes}
        before, buckets = around.before, self.buckets
        for (at, b, until), over in zip(writes, passing.reused, strict=True):
            unit = buckets[b].unit
            entry = unit % DEPTH
            here = before[at]
            if (held := tenant[entry]) != unit:
                for other, done in leaving[entry]:
                    if held != NONE and closed[other] > at:
                        raise Bug("BUCKET", f"bucket {other} is still written at {closed[other]} when its entry is "
                                  f"taken at {at}")  # fmt: skip
                    self._wait_reduce_scatter(here, other, last=done)
                leaving[entry], tenant[entry] = [], unit
            here.append(("acquire_gradient_buffer", b))
            around.due(until, passing.attention, over).append(("reduce", b))
            leaving[entry].append((b, last(b)))
        return tuple(map(tuple, leaving))

    def _reduce(self, events: list[Event], waiting: int, bucket: int) -> int:
        """Reduce a bucket. -> the bucket whose all-reduce over replicas is due next, or NONE."""
        if waiting != NONE:
            events.append(("replicate", waiting))
        events.append(("reduce", bucket))
        return bucket if self._has_replicas(bucket) else NONE

    def _wait_reduce_scatter(self, events: list[Event], bucket: int, *, last: bool) -> None:
        events.append(("wait_reduce_scatter", bucket))
        if last and self._has_replicas(bucket):
            events.append(("replicate", bucket))

    def _has_replicas(self, bucket: int) -> bool:
        b = self.buckets[bucket]
        return b.shards > 1 and len(b.replicate_ranks) > 1


def upcoming(reads: Sequence[Sequence[int]]) -> list[int]:
    """For each action, given its reads of units, the unit that is read next after it, or NONE. Reading the same
    unit again is no new read."""
    found, head, second = [NONE] * len(reads), NONE, NONE
    for a in reversed(range(len(reads))):
        if own := reads[a]:
            found[a] = second if head == own[-1] else head
            head, second = own[0], own[1] if len(own) > 1 else found[a]
    return found
