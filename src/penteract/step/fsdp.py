"""What happens to buckets around the instructions of one action, from what the actions before it left behind.

Whole buckets are waited for at their first use and summed after their last writer. What ZeRO 2 and 3 cut lies whole
only in ring buffers: parameters of a unit are gathered one turn ahead of their use, and its gradients leave after
the action that wrote them. The rule looks at one action, the unit that is read next, and the ring buffers: nothing
else, so equal circumstances give equal events. `events.py` applies it to every action of a step, a clock to each that
differs.

Zhao 2023 (2304.11277) §3.3 and §4 for prefetching and the limit on what is gathered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

from penteract.errors import Bug
from penteract.parallel.data import NONE
from penteract.step.ring_buffer import DEPTH

Question = Literal["gather", "wait_all_gather", "acquire_gradient_buffer", "reduce", "wait_reduce_scatter", "replicate"]
Event = tuple[Question, int]  # what to ask a reading about which bucket
At = Any  # where an instruction stands in its action: ordered


class Touch(NamedTuple):
    """An instruction that reads parameters, or writes their gradients."""

    at: At
    buckets: tuple[int, ...]
    writes: bool
    names: tuple[str, ...] = ()


class UnitTurns(NamedTuple):
    """What the rule looks at of an action.

    turns   the units whose cut parameters are read, in order, each with its first reader
    writes  of buckets whose gradients are cut: the first writer, the bucket, the last writer; in their order
    """

    turns: Sequence[tuple[At, int]]
    writes: Sequence[tuple[At, int, At]]


class FsdpState(NamedTuple):
    """What an action leaves to the next.

    there        the unit that lies in each entry of the ring buffer of parameters, or NONE
    gathering    units on their way there that nobody has waited for
    turn         the unit that was read last
    leaving      of each entry of the ring buffer of gradients: the buckets whose sum is on the wire, and whether it is
                 the last of the step
    replicating  the bucket whose sum over replicas is put on the wire before the next sum, or NONE
    """

    there: tuple[int, ...]
    gathering: frozenset[int] = frozenset()
    turn: int = NONE
    leaving: tuple[tuple[tuple[int, bool], ...], ...] = ((),) * DEPTH
    replicating: int = NONE


class Due(NamedTuple):
    """Of one action: buckets that are whole after the update and read here for the first time in a step, each with
    where; and those that gather all micro-batches, and are written here for the last time."""

    needs: Sequence[tuple[At, int]] = ()
    sums: Sequence[tuple[At, int]] = ()


class ShardedBucket(Protocol):
    """What the rule looks at of a bucket: its unit, what is cut of it, over how many ranks, and who has the same."""

    @property
    def unit(self) -> int:
        """The unit (embedding, layer or head) that it is a part of, counted on the rank in the order of forward."""
        ...

    @property
    def cut_parameters(self) -> bool:
        """Whether parameters are cut between their uses, and gathered for each (ZeRO 3)."""
        ...

    @property
    def cut_gradients(self) -> bool:
        """Whether gradients are cut between actions: ZeRO 2 and 3, unless they have `reduce_scatter_once`."""
        ...

    @property
    def shards(self) -> int:
        """Over how many ranks it is cut; 1: it is whole."""
        ...

    @property
    def replicate_ranks(self) -> tuple[int, ...]:
        """The ranks with the same shard, one in each shard group."""
        ...


@dataclass(slots=True)
class _Around:
    """Events of one action under way."""

    before: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict[At, list[Event]](list))
    after: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict[At, list[Event]](list))


Table = Mapping[At, Sequence[Event]]


@dataclass(slots=True)
class FsdpRule:
    """The rule for one rank's buckets. `depth`: entries of the ring buffer of parameters."""

    buckets: Sequence[ShardedBucket]
    depth: int
    cut: dict[int, list[int]] = field(init=False)  # unit -> its buckets with cut parameters

    def __post_init__(self) -> None:
        """List the buckets of each unit whose parameters are cut."""
        self.cut = defaultdict[int, list[int]](list)
        for i, b in enumerate(self.buckets):
            if b.cut_parameters:
                self.cut[b.unit].append(i)

    def begin(self) -> FsdpState:
        """At the beginning of a step nothing is gathered, as parameters have changed."""
        return FsdpState((NONE,) * self.depth)

    def look(self, touches: Iterable[Touch]) -> UnitTurns:
        """What matters of an action's instructions."""
        turns, buckets = list[tuple[At, int]](), self.buckets
        first, last = dict[int, At](), dict[int, At]()
        for at, own, writes, _ in touches:
            for b in own:
                unit = buckets[b].unit
                if writes and buckets[b].cut_gradients:
                    first.setdefault(b, at)
                    last[b] = at
                elif not writes and buckets[b].cut_parameters and (not turns or turns[-1][1] != unit):
                    turns.append((at, unit))
        return UnitTurns(turns, [(at, b, last[b]) for at, b in sorted((at, b) for b, at in first.items())])

    def action(
        self, left: FsdpState, passing: UnitTurns, due: Due, following: int, last: Callable[[int], bool]
    ) -> tuple[Table, Table, FsdpState]:
        """-> events before and after instructions, and what is left.

        following  the unit that is read next after this action's, or NONE
        last       whether a bucket is written for the last time in this action
        """
        around = _Around()
        there, gathering, turn = self._gathers(around, left, passing.turns, following)
        for at, b in due.needs:
            around.before[at].append(("wait_all_gather", b))
        replicating = self._whole_sums(around, left.replicating, due.sums)
        leaving = self._cut_sums(around, left.leaving, passing.writes, last)
        return around.before, around.after, FsdpState(there, gathering, turn, leaving, replicating)

    def end(self, left: FsdpState, shared: Sequence[int], written: Callable[[int], At]) -> list[Event]:
        """After the last action: sums of buckets that stages share, and the waits for those that are on the wire.

        written  where each was written last
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
        self, around: _Around, left: FsdpState, turns: Sequence[tuple[At, int]], following: int
    ) -> tuple[tuple[int, ...], frozenset[int], int]:
        """A unit is gathered one turn ahead, or with its own turn where the one before lies in its entry. What still
        lies in its entry is not gathered again."""
        if turns and turns[0][1] == left.turn:
            turns = turns[1:]
        if not turns:
            return left.there, left.gathering, left.turn
        there, gathering, n = list(left.there), set(left.gathering), self.depth
        upcoming = [*(unit for _, unit in turns[1:]), following]
        for (at, now), after in zip(turns, upcoming, strict=True):
            before = around.before[at]
            for unit in (now, after):
                free = unit == now or (unit != NONE and unit % n != now % n)
                if free and there[unit % n] != unit:
                    there[unit % n] = unit
                    gathering.add(unit)
                    before.extend(("gather", b) for b in self.cut[unit])
            if now in gathering:
                gathering.remove(now)
                before.extend(("wait_all_gather", b) for b in self.cut[now])
        return tuple(there), frozenset(gathering), turns[-1][1]

    # ---- gradients -------------------------------------------------------------------------------------------

    def _whole_sums(self, around: _Around, waiting: int, sums: Sequence[tuple[At, int]]) -> int:
        """A bucket that gathers all micro-batches is summed after its last writer; over replicas, when the next is."""
        for at, b in sorted(sums):
            waiting = self._reduce(around.after[at], waiting, b)
        return waiting

    def _cut_sums(
        self,
        around: _Around,
        left: tuple[tuple[tuple[int, bool], ...], ...],
        writes: Sequence[tuple[At, int, At]],
        last: Callable[[int], bool],
    ) -> tuple[tuple[tuple[int, bool], ...], ...]:
        """A bucket whose gradients are cut is whole within one action alone, in the entry of its unit.

        Before another takes the entry, what has left from there must have landed.
        """
        if not writes:
            return left
        leaving, tenant, closed = list(map(list, left)), [NONE] * DEPTH, {b: at for _, b, at in writes}
        for at, b, until in writes:
            unit = self.buckets[b].unit
            entry = unit % DEPTH
            if tenant[entry] != unit:
                for other, done in leaving[entry]:
                    if tenant[entry] != NONE and closed[other] > at:
                        raise Bug("BUCKET", f"bucket {other} is still written at {closed[other]} when its entry is "
                                  f"taken at {at}")  # fmt: skip
                    self._wait_reduce_scatter(around.before[at], other, last=done)
                leaving[entry], tenant[entry] = [], unit
            around.before[at].append(("acquire_gradient_buffer", b))
            around.after[until].append(("reduce", b))
            leaving[entry].append((b, last(b)))
        return tuple(map(tuple, leaving))

    def _reduce(self, events: list[Event], waiting: int, bucket: int) -> int:
        """-> the bucket whose sum over replicas is due then."""
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


def upcoming(turns: Sequence[Sequence[int]]) -> list[int]:
    """For each action, given the turns of units in it, the unit whose turn comes after them, or NONE. A unit that was
    read last goes on without a new turn."""
    found, head, second = [NONE] * len(turns), NONE, NONE
    for a in reversed(range(len(turns))):
        if own := turns[a]:
            found[a] = second if head == own[-1] else head
            head, second = own[0], own[1] if len(own) > 1 else found[a]
    return found


class _Whole(NamedTuple):
    """A unit's parameters, cut over two ranks."""

    unit: int
    cut_parameters: bool = True
    cut_gradients: bool = False
    shards: int = 2
    replicate_ranks: tuple[int, ...] = ()


@cache
def _ring_buffer(units: int, depth: int) -> tuple[FsdpRule, dict[Any, Any]]:
    """The rule of so many units that are cut; and for an action's circumstances, what it leaves and gathers."""
    return FsdpRule([_Whole(unit) for unit in range(units)], depth), {}


def gathers(turns: Sequence[tuple[int, ...]], depth: int) -> Counter[int]:
    """How often a step gathers each unit into a ring buffer of so many entries. `turns`: of units, of each action."""
    known: dict[tuple[FsdpState, tuple[int, ...], int], tuple[FsdpState, list[int]]]
    rule, known = _ring_buffer(1 + max([unit for own in {*turns} for unit in own], default=NONE), depth)
    left, found = rule.begin(), Counter[int]()
    times = Counter[tuple[FsdpState, tuple[int, ...], int]]()
    for own, following in zip(turns, upcoming(turns), strict=True):
        key = left, own, following
        if key not in known:
            passing = UnitTurns([(k, unit) for k, unit in enumerate(own)], ())
            before, _, then = rule.action(left, passing, Due(), following, lambda _: False)
            asked = (unit for events in before.values() for question, unit in events if question == "gather")
            known[key] = then, list(asked)
        left = known[key][0]
        times[key] += 1
    for key, n in times.items():
        for unit in known[key][1]:
            found[unit] += n
    return found
