"""The ops of a rank's step, with its bucket events: every action as loops over segments, and what comes before and
after the actions, in the order of the walk. Actions in equal circumstances are derived once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from penteract.parallel.bucket_plans import NONE
from penteract.readings.layers.touches import NEVER
from penteract.readings.time.clock import PART, WAIT, Key, Op
from penteract.readings.time.clock_program import At, ClockProgram, PassKey
from penteract.readings.time.numbered_schedule import Order, Spot
from penteract.readings.time.ops import DATA
from penteract.readings.time.rank_clock import MESSAGE, Loop, Loops, PlacedSegment
from penteract.step import names
from penteract.step.fsdp import Due, Event, FsdpState, NumberedStates, Table, upcoming
from penteract.step.walk import closing, opening

PIPELINE = PART["pipeline"]
_GATHERS = ("gather", "wait_all_gather")
_KEYED = ("widen", "gather")  # these wait for an op in flight, or start one
_OF_BUCKETS = (*_KEYED, "measure", "update")
_NO_KEY: Key = ("", 0, 0)
_NO_BUCKETS = frozenset[int]()


# The number of an action's spot, that of the FSDP state before it, the unit that follows it.
Circumstances = tuple[int, int, int]


class Derived(NamedTuple):
    """A rank's step, as numbers of its clock.

    opening  before the first action; `closing`: after the last, up to the sum of squares and losses; `update`: after
             that
    actions  the number of each action's loops; `left`: the number of the FSDP state before it
    """

    opening: int
    actions: Sequence[int]
    left: Sequence[int]
    closing: int
    update: Sequence[PlacedSegment]


@dataclass(slots=True)
class Shared:
    """Results shared by ranks that first read and last write their buckets in the same places.

    spots    those of actions, by number: equal ones have one
    actions  by circumstances: the number of its loops, that of the FSDP state after it, events of reductions
    made     the number of ops, by event, bucket and distance in units
    lefts    FSDP states after actions
    outside  what comes before and after all actions, by the last events and the reductions in flight
    """

    spots: dict[Spot, int] = field(default_factory=dict[Spot, int])
    actions: dict[Circumstances, tuple[int, int, tuple[Event, ...]]] = field(
        default_factory=dict[Circumstances, tuple[int, int, tuple[Event, ...]]]
    )
    made: dict[tuple[str, int, int, int], int] = field(default_factory=dict[tuple[str, int, int, int], int])
    lefts: NumberedStates = field(default_factory=NumberedStates)
    outside: dict[Any, tuple[int, int, Sequence[PlacedSegment]]] = field(
        default_factory=dict[Any, "tuple[int, int, Sequence[PlacedSegment]]"]
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where a rank reads and writes its buckets.

    needs    by kind of action: where buckets that are gathered after the update are first read
    sums     by kind of action: where buckets that are reduced once a step are last written
    written  of each bucket: the last action that writes it (its place in `Order.lasts`), its kind, the position there
    done     by kind of action: the buckets that it is the last to write
    home     of each bucket: the unit in the keys of its reductions, and its number among the buckets of that unit
    """

    needs: Mapping[PassKey, Sequence[tuple[At, int]]]
    sums: Mapping[PassKey, Sequence[tuple[At, int]]]
    written: Mapping[int, tuple[int, PassKey, At]]
    done: Mapping[PassKey, frozenset[int]]
    home: Mapping[int, tuple[int, int]]
    shared: Shared

    @staticmethod
    def of(program: ClockProgram, order: Order) -> Places:
        """Find where buckets are first read and last written."""
        read, written, until = dict[int, tuple[PassKey, At]](), dict[int, tuple[int, PassKey, At]](), order.lasts.index
        for walk in order.firsts:
            through, last = program.walk(walk), until(walk)
            for b, at in through.reads.items():
                read.setdefault(b, (walk, at))
            for b, at in through.writes.items():
                if b not in written or last > written[b][0]:
                    written[b] = last, walk, at
        needs, sums = defaultdict[PassKey, list[tuple[At, int]]](list), defaultdict[PassKey, list[tuple[At, int]]](list)
        for b, (walk, at) in read.items():
            needs[walk].append((at, b))
        for some in needs.values():
            some.sort()
        home, count = dict[int, tuple[int, int]](), defaultdict[int, int](int)
        for b, (_, walk, at) in sorted(written.items(), key=lambda item: (item[1][0], item[1][2], item[0])):
            bucket, unit = program.buckets[b], program.packed.plans[b].unit
            if unit == NONE or not bucket.cut_gradients:
                unit = program.walk(walk).units[at[0]]
                if not bucket.across_pp_ranks:
                    sums[walk].append((at, b))
            home[b] = unit, count[unit]
            count[unit] += 1
        # Ranks that first read and last write buckets in the same places share results.
        places = tuple([(b, walk, at) for b, (_, walk, at) in written.items()])
        first_reads = tuple([(walk, tuple(some)) for walk, some in needs.items()])
        shared = program.derived.setdefault((places, first_reads), Shared())
        done = defaultdict[PassKey, list[int]](list)
        for b, (_, walk, _) in written.items():
            done[walk].append(b)
        return Places(dict(needs), dict(sums), written, {w: frozenset(b) for w, b in done.items()}, home, shared)


def derive(program: ClockProgram, order: Order) -> Derived:
    """Derive the step of a rank that computes these actions."""
    key = order.firsts, order.lasts
    if (places := program.places.get(key)) is None:
        places = program.places[key] = Places.of(program, order)
    return _Derivation(program, order, places, places.shared).derive()


def derive_action(program: ClockProgram, walk: PassKey, before: FsdpState) -> int:
    """The number of the loops of an action in the midst of a step, after which no unit is read: without any event of
    once a step. `before`: the FSDP state before it."""
    order = Order((0,), (Spot(walk, first=False, last=False),), (walk,), (walk,))
    places = Places.of(program, order)
    return _Derivation(program, order, places, places.shared).action(before)


@dataclass(slots=True)
class _Derivation:
    """The derivation for one list of actions. `summing`: buckets whose reduction is in flight, in the order in which
    these were started."""

    program: ClockProgram
    order: Order
    places: Places
    shared: Shared
    summing: dict[int, Key] = field(default_factory=dict[int, Key])

    def derive(self) -> Derived:
        program, shared, cached = self.program, self.shared, self.shared.actions
        rule, written = program.rule, self.places.written
        left, actions, before = shared.lefts.number(rule.begin()), list[int](), list[int]()
        reductions: list[tuple[Event, ...]] = []
        turns, after = [program.walk(spot.walk).turns for spot in self.order.spots], repeat(NONE)
        if any(turns):
            after = upcoming([turns[i] for i in self.order.actions])
        alike = list(map(self._alike, self.order.spots))
        numbers = [shared.spots.setdefault(spot, len(shared.spots)) for spot in alike]
        for i, following in zip(self.order.actions, after, strict=False):
            before.append(left)
            key = (numbers[i], left, following)
            found = cached.get(key)
            if found is None:
                found = cached[key] = self._action(alike[i], left, following)
            action, left, sums = found
            if sums:
                reductions.append(sums)
            actions.append(action)
        self._note_last(reductions)
        across = sorted(b for b in written if program.buckets[b].across_pp_ranks)
        events = rule.end(shared.lefts[left], across, lambda b: written[b][::2])
        self._note(events)
        opening, closing, update = self._outside(events)
        return Derived(opening, actions, before, closing, update)

    def action(self, before: FsdpState) -> int:
        """The number of the loops of the only action."""
        return self._action(self.order.spots[0], self.shared.lefts.number(before), NONE)[0]

    # ---- actions ---------------------------------------------------------------------------------------------

    def _alike(self, spot: Spot) -> Spot:
        """The spot of other actions of its kind, if this one has the same events: being the first matters only where
        buckets are read first, being the last only where some are written last."""
        walk, first, last = spot
        return Spot(walk, first and walk in self.places.needs, last and walk in self.places.done)

    def _action(self, spot: Spot, number: int, following: int) -> tuple[int, int, tuple[Event, ...]]:
        """The number of an action's loops, that of the FSDP state after it, and its events of reductions. `number`:
        that of the state before it; `following`: the unit that is read next after it."""
        walk, first, last = spot
        program, places, through = self.program, self.places, self.program.walk(walk)
        due = Due(places.needs.get(walk, ()) if first else (), places.sums.get(walk, ()) if last else ())
        done = places.done.get(walk, _NO_BUCKETS) if last else _NO_BUCKETS
        before, after, left = program.rule.action(
            self.shared.lefts[number], through.unit_reads, due, following, done.__contains__
        )
        inserted, needs = dict[int, list[tuple[int, int, int]]](), dict[int, tuple[int, ...]]()
        sums = self._insert(before, after, through.units, inserted, needs) if before or after else ()
        if through.arrives != NEVER:  # wait for the message after bucket events, right before it is read
            inserted.setdefault(0, []).append((through.arrives, 0, self._number(("m", 0, 0, 0))))
        row = program.row(walk)
        if inserted:
            row = [*row]
            for k, own in inserted.items():
                row[k] = program.placed(through, walk[0], k, own, needs.get(k, ()))
        return program.clock.action(repeats(row)), self.shared.lefts.number(left), sums

    def _insert(
        self, before: Table, after: Table, units: Sequence[int], inserted: dict[int, list[tuple[int, int, int]]],
        needs: dict[int, tuple[int, ...]],
    ) -> tuple[Event, ...]:  # fmt: skip
        """Number the ops of an action's bucket events, by the unit in which they are `inserted`. `needs`: of each unit,
        the buckets that are gathered after the last update. Returns the events of reductions."""
        alike, summed, gathered = self.program.alike, self.program.summed, self.program.gathered
        homes, made, here, unit, own = self.places.home, self.shared.made, NONE, NONE, list[tuple[int, int, int]]()
        events: list[tuple[At, int, Sequence[Event]]] = [(at, 0, some) for at, some in before.items()]
        events += [(at, 1, some) for at, some in after.items()]
        events.sort()
        sums: list[Event] = []
        for (k, pos), when, some in events:
            if k != here:
                here, unit, own = k, units[k], inserted.setdefault(k, [])
            for event in some:
                question, b = event
                if question == "acquire_gradient_buffer":
                    continue
                if question not in _GATHERS:
                    home, place = homes[b]
                    if summed[b]:
                        sums.append(event)
                elif b in gathered:
                    home, place = gathered[b]
                else:  # gathered after the last update
                    waits = needs.get(k, ())
                    own.append((pos, when, self._number(("p", 0, 0, len(waits)))))
                    needs[k] = (*waits, b)
                    continue
                # The same for equal buckets at the same distance in units.
                key = (question, alike[b], home - unit, place)
                if (number := made.get(key)) is None:
                    number = self._number(key, b)
                own.append((pos, when, number))
        return tuple(sums)

    def _event(self, question: str, b: int) -> int:
        """The number of the ops of a reduction outside of the actions."""
        home, place = self.places.home[b]
        return self._number((question, self.program.alike[b], home, place), b)

    def _number(self, key: tuple[str, int, int, int], b: int = NONE) -> int:
        """The number of these ops."""
        made = self.shared.made
        if key not in made:
            made[key] = len(self.program.bucket_ops)
            self.program.bucket_ops.append(tuple(self._ops(key, b)))
        return made[key]

    def _ops(self, key: tuple[str, int, int, int], b: int) -> Sequence[Op]:
        question, _, away, number = key
        make, bucket = self.program.ops, self.program.buckets[b]
        match question:
            case "gather":
                return list(make.gather(bucket, ("g", away, number)))
            case "wait_all_gather":
                return [(WAIT, ("g", away, number), DATA, names.WAIT_PARAMETERS)]
            case "p":
                return [(WAIT, ("p", 0, number), DATA, names.WAIT_PARAMETERS)]
            case "m":
                return [(WAIT, MESSAGE, PIPELINE, names.WAIT_STAGE)]
            case "reduce":
                return list(make.reduce(bucket, ("r", away, number)))
            case "wait_reduce_scatter":
                return list(make.wait_reduce_scatter(bucket, ("r", away, number)))
            case _:
                return list(make.replicate(bucket, ("r", away, number), ("r", away, number)))

    def _note_last(self, reductions: Sequence[tuple[Event, ...]]) -> None:
        """The same of the reductions of all actions: only the last event of each bucket matters."""
        every = {b for some in {id(some): some for some in reductions}.values() for _, b in some}
        seen: set[int] = set()
        flying: list[int] = []
        for some in reversed(reductions):
            if len(seen) == len(every):
                break
            for question, b in reversed(some):
                if b not in seen and question != "wait_reduce_scatter":
                    flying.append(b)
                seen.add(b)
        self.summing = {b: ("r", *self.places.home[b]) for b in reversed(flying)}

    def _note(self, events: Sequence[Event]) -> None:
        """Keep track of the reductions in flight."""
        summing, summed, home = self.summing, self.program.summed, self.places.home
        for question, b in events:
            summing.pop(b, None)
            if question != "wait_reduce_scatter" and summed[b]:
                summing[b] = ("r", *home[b])

    # ---- outside of the actions ------------------------------------------------------------------------------

    def _outside(self, events: Sequence[Event]) -> tuple[int, int, Sequence[PlacedSegment]]:
        """The segments before the actions, those after them, and those of the update. `events`: bucket events after the
        last action."""
        key = (tuple(events), tuple(self.summing.items()), tuple(self.places.home.items()))
        if key not in self.shared.outside:
            self.shared.outside[key] = self._outside_of(events)
        return self.shared.outside[key]

    def _outside_of(self, events: Sequence[Event]) -> tuple[int, int, Sequence[PlacedSegment]]:
        program, clock = self.program, self.program.clock
        before = [op for event in opening(program.outside) for op in self._outside_ops(event)]
        after = [op for question, b in events for op in program.bucket_ops[self._event(question, b)]]
        update, summed = list[Op](), False
        for event in closing(program.outside, self.summing):
            question = event[0]
            own = self._bucket_ops(question, event[1]) if question in _OF_BUCKETS else self._outside_ops(event)
            (update if summed else after).extend(own)
            summed = summed or (question == "all_reduce" and event[1].axis == "world")
        return clock.action(repeats(self._once(before))), clock.action(repeats(self._once(after))), self._once(update)

    def _once(self, ops: Sequence[Op]) -> Sequence[PlacedSegment]:
        """These ops as one segment: simulating each bucket's on their own would take ten times as long."""
        return [(self.program.clock.segment(tuple(ops)), 0, ())] if ops else []

    def _outside_ops(self, event: tuple[Any, ...]) -> Sequence[Op]:
        """The ops of an event of the walk outside of the actions, if it is of no bucket."""
        match event:
            case ("begin",):
                return [self.program.ops.largest(b) for b in self.program.buckets if b.gathered_as == "fp8"]
            case ("all_reduce", reduction):
                return self.program.ops.all_reduce(reduction)
            case ("end",):
                return list(self.program.ops.end())
            case _:
                return ()

    def _bucket_ops(self, question: str, b: int) -> Sequence[Op]:
        """The ops of an event of a bucket outside of the actions. Those of equal buckets differ only in their key."""
        program = self.program
        like = (question, program.alike[b])
        if (found := program.outside_ops.get(like)) is None:
            found = tuple(self._made(question, b))
            if not program.buckets[b].offloaded:  # otherwise an update depends on those before it
                program.outside_ops[like] = found
        if question not in _KEYED:
            return found
        key: Key = ("u", b, 0) if question == "gather" else ("r", *self.places.home[b])
        return [tuple([key if part is _NO_KEY else part for part in op]) for op in found]

    def _made(self, question: str, b: int) -> Iterable[Op]:
        make, bucket = self.program.ops, self.program.buckets[b]
        match question:
            case "widen":
                return make.widen(bucket, _NO_KEY)
            case "measure":
                return (make.measure(bucket),)
            case "update":
                return make.update(b)
            case _:
                return make.gather(bucket, _NO_KEY)


def repeats(row: Sequence[PlacedSegment]) -> Loops:
    """Loops over equal segments. A segment that waits for gathers of the last step is a loop of its own."""
    out: list[Loop] = []
    i = 0
    while i < len(row):
        segment, unit, needs = row[i]
        n, stride = 1, row[i + 1][1] - unit if i + 1 < len(row) else 0
        while i + n < len(row) and not needs and row[i + n] == (segment, unit + n * stride, ()):
            n += 1
        out.append(((row[i],), n, stride))
        i += n
    return tuple(out)
