"""The ops of a rank's step, with its bucket events: every action as runs of segments, and what comes before and after
the actions, in the order of the walk. Actions in equal circumstances are derived once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penteract.parallel.data import NONE
from penteract.readings.time.clock import PART, WAIT, Key, Op
from penteract.readings.time.ops import DATA
from penteract.readings.time.rank_clock import MESSAGE, Run, Runs, Step
from penteract.readings.time.stage import NEVER, At, Inserted, PassKey, Stage
from penteract.schedule.actions import Compute
from penteract.step import names
from penteract.step.fsdp import Due, Event, FsdpState, upcoming
from penteract.step.walk import closing, opening

PIPELINE = PART["pipeline"]
# The kind of an action, whether it is the first and the last of its kind, the number of the FSDP state before it, the
# unit that follows it.
Circumstances = tuple[PassKey, bool, bool, int, int]


class Derived(NamedTuple):
    """A rank's step, as numbers of its clock.

    opening  before the first action; `closing`: after the last, up to the sum of squares and losses; `update`: after
             that
    actions  the runs of each action; `left`: the number of the FSDP state before it
    """

    opening: int
    actions: Sequence[int]
    left: Sequence[int]
    closing: int
    update: Sequence[Step]


@dataclass(slots=True)
class Shared:
    """Results shared by ranks that first read and last write their buckets in the same places.

    actions  by circumstances: the runs, the number of the FSDP state after the action, events of reductions
    made     the number of ops, by event, bucket and distance in units
    lefts    FSDP states after actions; `numbers`: the number of each
    outside  what comes before and after all actions, by the last events and the reductions in flight
    """

    actions: dict[Circumstances, tuple[int, int, tuple[Event, ...]]] = field(
        default_factory=dict[Circumstances, tuple[int, int, tuple[Event, ...]]]
    )
    made: dict[tuple[str, int, int, int], int] = field(default_factory=dict[tuple[str, int, int, int], int])
    lefts: list[FsdpState] = field(default_factory=list[FsdpState])
    numbers: dict[FsdpState, int] = field(default_factory=dict[FsdpState, int])
    outside: dict[Any, tuple[int, int, Sequence[Step]]] = field(
        default_factory=dict[Any, "tuple[int, int, Sequence[Step]]"]
    )

    def number(self, left: FsdpState) -> int:
        """The number of an FSDP state: equal states have one number."""
        if (found := self.numbers.get(left)) is not None:
            return found
        self.lefts.append(left)
        self.numbers[left] = len(self.lefts) - 1
        return len(self.lefts) - 1


def derive(stage: Stage, actions: Sequence[Compute]) -> Derived:
    """Derive the step of a rank that computes `actions`."""
    return _Derivation(stage, actions).derive()


@dataclass(slots=True)
class _Derivation:
    """The derivation for one list of actions.

    needs    by kind of action: where buckets that are gathered after the update are first read
    sums     by kind of action: where buckets that are reduced once a step are last written
    written  of each bucket: the last action that writes it, its kind, the position there
    home     of each bucket: the unit in the keys of its reductions, and its number among the buckets of that unit
    summing  buckets whose reduction is in flight, in the order in which these were started
    """

    stage: Stage
    actions: Sequence[Compute]
    needs: dict[PassKey, list[tuple[At, int]]] = field(default_factory=dict[PassKey, list[tuple[At, int]]])
    sums: dict[PassKey, list[tuple[At, int]]] = field(default_factory=dict[PassKey, list[tuple[At, int]]])
    written: dict[int, tuple[int, PassKey, At]] = field(default_factory=dict[int, tuple[int, PassKey, At]])
    home: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    summing: dict[int, Key] = field(default_factory=dict[int, Key])
    shared: Shared = field(default_factory=Shared)

    def derive(self) -> Derived:
        stage, rule = self.stage, self.stage.rule
        walks: list[PassKey] = [(a.kind, a.chunk) for a in self.actions]
        first, last = dict[PassKey, int](), dict[PassKey, int]()
        for i, walk in enumerate(walks):
            first.setdefault(walk, i)
            last[walk] = i
        self._look(first, last)
        # Ranks that first read and last write buckets in the same places share results.
        places = tuple([(b, walk, at) for b, (_, walk, at) in self.written.items()])
        read = tuple([(walk, tuple(some)) for walk, some in self.needs.items()])
        self.shared = shared = stage.derived.setdefault((places, read), self.shared)
        cached, left, runs, before = shared.actions, shared.number(rule.begin()), list[int](), list[int]()
        after = upcoming([stage.walk(walk).turns for walk in walks])
        for i, (walk, following) in enumerate(zip(walks, after, strict=True)):
            before.append(left)
            key = (walk, first[walk] == i, last[walk] == i, left, following)
            found = cached.get(key)
            if found is None:
                found = cached[key] = self._action(key)
            action, left, sums = found
            if sums:
                self._note(sums)
            runs.append(action)
        across = sorted(b for b in self.written if stage.buckets[b].across_stages)
        events = rule.end(shared.lefts[left], across, lambda b: self.written[b][::2])
        self._note(events)
        opening, closing, update = self._outside(events)
        return Derived(opening, runs, before, closing, update)

    def _look(self, first: Mapping[PassKey, int], last: Mapping[PassKey, int]) -> None:
        """Find where buckets are first read and last written."""
        stage, read, written = self.stage, dict[int, tuple[int, PassKey, At]](), self.written
        for walk, when in first.items():
            until, through = last[walk], stage.walk(walk)
            for b, at in through.reads.items():
                if b not in read or when < read[b][0]:
                    read[b] = when, walk, at
            for b, at in through.writes.items():
                if b not in written or until > written[b][0]:
                    written[b] = until, walk, at
        for b, (_, walk, at) in read.items():
            self.needs.setdefault(walk, []).append((at, b))
        for some in self.needs.values():
            some.sort()
        count = defaultdict[int, int](int)
        for b, (_, walk, at) in sorted(written.items(), key=lambda item: (item[1][0], item[1][2], item[0])):
            bucket, unit = stage.buckets[b], stage.bucket_plans[b].unit
            if unit == NONE or not bucket.cut_gradients:
                unit = stage.walk(walk).units[at[0]]
                if not bucket.across_stages:
                    self.sums.setdefault(walk, []).append((at, b))
            self.home[b] = unit, count[unit]
            count[unit] += 1

    # ---- actions ---------------------------------------------------------------------------------------------

    def _action(self, circumstances: Circumstances) -> tuple[int, int, tuple[Event, ...]]:
        """One action's runs, the number of the FSDP state after it, and its events of reductions."""
        walk, first, last, number, following = circumstances
        stage, through, left = self.stage, self.stage.walk(walk), self.shared.lefts[number]
        due = Due(self.needs.get(walk, ()) if first else (), self.sums.get(walk, ()) if last else ())
        before, after, left = stage.rule.action(
            left, through.unit_turns, due, following, lambda b: last and self.written[b][1] == walk
        )
        inserted = defaultdict[int, list[tuple[int, int, int]]](list)
        needs, sums = defaultdict[int, tuple[int, ...]](tuple), list[Event]()
        for at, when, events in sorted([(at, when, some) for when, table in enumerate((before, after))
                                        for at, some in table.items()]):  # fmt: skip
            k, pos = int(at[0]), int(at[1])
            unit = through.units[k]
            for event in events:
                if event[0] == "wait_all_gather" and not stage.buckets[event[1]].cut_parameters:
                    inserted[k].append((pos, when, self._number(("p", 0, 0, len(needs[k])))))
                    needs[k] += (event[1],)
                elif event[0] != "acquire_gradient_buffer":
                    inserted[k].append((pos, when, self._event(event, unit)))
                    if event[0] in ("reduce", "replicate", "wait_reduce_scatter") and stage.buckets[event[1]].summed:
                        sums.append(event)
        if through.arrives != NEVER:  # wait for the message after bucket events, right before it is read
            inserted[0].append((through.arrives, 0, self._number(("m", 0, 0, 0))))
        action = stage.clock.action(repeats(self._row(walk, inserted, needs)))
        return action, self.shared.number(left), tuple(sums)

    def _row(self, walk: PassKey, inserted: Mapping[int, Inserted], needs: Mapping[int, tuple[int, ...]]) -> list[Step]:
        row, stage, through = list[Step](), self.stage, self.stage.walk(walk)
        for k, unit in enumerate(through.units):
            lent, whole = through.lent.get(k, ()), k in through.whole
            segment = stage.segment(stage.layer_types[unit], walk[0], inserted.get(k, ()), lent, whole=whole)
            row.append((segment, unit, needs.get(k, ())))
        return row

    def _event(self, event: Event, unit: int) -> int:
        """The number of the ops of a bucket event in a segment of `unit`."""
        question, b = event
        own, number = self._gathered(b) if question in ("gather", "wait_all_gather") else self.home[b]
        key = (question, id(self.stage.buckets[b]), own - unit, number)
        found = self.shared.made.get(key)
        return self._number(key, b) if found is None else found

    def _gathered(self, b: int) -> tuple[int, int]:
        unit = self.stage.bucket_plans[b].unit
        return unit, self.stage.rule.cut[unit].index(b)

    def _number(self, key: tuple[str, int, int, int], b: int = NONE) -> int:
        """The number of these ops; they are the same for equal buckets at the same distance in units."""
        made = self.shared.made
        if key not in made:
            made[key] = len(self.stage.bucket_ops)
            self.stage.bucket_ops.append(tuple(self._ops(key, b)))
        return made[key]

    def _ops(self, key: tuple[str, int, int, int], b: int) -> Sequence[Op]:
        question, _, away, number = key
        make, bucket = self.stage.ops, self.stage.buckets[b]
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

    def _note(self, events: Sequence[Event]) -> None:
        """Keep track of the reductions in flight."""
        for question, b in events:
            self.summing.pop(b, None)
            if question != "wait_reduce_scatter" and self.stage.buckets[b].summed:
                self.summing[b] = ("r", *self.home[b])

    # ---- outside of the actions ------------------------------------------------------------------------------

    def _outside(self, events: Sequence[Event]) -> tuple[int, int, Sequence[Step]]:
        """The segments before the actions, those after them, and those of the update. `events`: bucket events after the
        last action."""
        key = (tuple(events), tuple(self.summing.items()), tuple(self.home.items()))
        if key not in self.shared.outside:
            self.shared.outside[key] = self._outside_of(events)
        return self.shared.outside[key]

    def _outside_of(self, events: Sequence[Event]) -> tuple[int, int, Sequence[Step]]:
        stage, clock = self.stage, self.stage.clock
        before = [self._step(ops) for event in opening(stage.outside) if (ops := self._outside_ops(event))]
        rows = [self._step(stage.bucket_ops[self._event(event, 0)]) for event in events]
        after, summed = list[Step](), False
        for question, *about in closing(stage.outside, self.summing):
            unit = self.home[about[0]][0] if question == "widen" else about[0] if question == "gather" else 0
            if ops := self._outside_ops((question, *about), unit):
                (after if summed else rows).append(self._step(ops, unit))
            summed = summed or (question == "agree" and about[0].axis == "world")
        return clock.action(repeats(before)), clock.action(repeats(rows)), after

    def _step(self, ops: Sequence[Op], unit: int = 0) -> Step:
        return self.stage.clock.segment(tuple(ops)), unit, ()

    def _outside_ops(self, event: tuple[Any, ...], unit: int = 0) -> Sequence[Op]:
        """The ops of an event of the walk outside of the actions, in a segment of `unit`."""
        stage, make = self.stage, self.stage.ops
        match event:
            case ("begin",):
                return [make.largest(b) for b in stage.buckets if b.gathered_as == "code"]
            case ("agree", agreement):
                return make.agree(agreement)
            case ("widen", int(b)):
                home, number = self.home[b]
                return list(make.widen(stage.buckets[b], ("r", home - unit, number)))
            case ("measure", int(b)):
                return [make.measure(stage.buckets[b])]
            case ("update", int(b)):
                return list(make.update(b))
            case ("gather", int(b)):
                return list(make.gather(stage.buckets[b], ("u", 0, 0)))
            case ("end",):
                return list(make.end())
            case _:
                return ()


def repeats(row: Sequence[Step]) -> Runs:
    """Runs of equal segments. A segment that waits for gathers of the last step is a run of its own."""
    out, i = list[Run](), 0
    while i < len(row):
        segment, unit, needs = row[i]
        n, step = 1, row[i + 1][1] - unit if i + 1 < len(row) else 0
        while i + n < len(row) and not needs and row[i + n] == (segment, unit + n * step, ()):
            n += 1
        out.append(((row[i],), n, step))
        i += n
    return tuple(out)
