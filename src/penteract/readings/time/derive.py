"""The bucket events of a rank's step, in equal circumstances derived once: every action as runs of segments, and what
comes before and after them in the walk's order.
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
from penteract.readings.time.stage import NEVER, At, Beside, Stage, Walk
from penteract.schedule.actions import Compute
from penteract.step import names
from penteract.step.fsdp import Due, Event, FsdpState, upcoming
from penteract.step.walk import closing, opening

PIPELINE = PART["pipeline"]
# The kind of an action, first and last of its kind, the number of what was left to it, the unit that follows.
Circumstances = tuple[Walk, bool, bool, int, int]


class Derived(NamedTuple):
    """A rank's step, in numbers of its clock.

    opening  before the first action; `closing`: after the last, to the sum of squares and losses; `update`: what
             follows that
    actions  the runs of each; `left`: a number for what lies in the rings before it
    """

    opening: int
    actions: Sequence[int]
    left: Sequence[int]
    closing: int
    update: Sequence[Step]


@dataclass(slots=True)
class Shared:
    """What is derived for ranks that read first and write last in the same places.

    actions  in their circumstances: the runs, the number of what is left, events of sums
    made     ops, by what happens to which bucket and how far away
    lefts    what was left by some action; `numbers`: of each
    outside  what comes before and after all actions, by the last events and the sums on the wire
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
        """The same for the same."""
        if (known := self.numbers.get(left)) is not None:
            return known
        self.lefts.append(left)
        self.numbers[left] = len(self.lefts) - 1
        return len(self.lefts) - 1


def derive(stage: Stage, actions: Sequence[Compute]) -> Derived:
    """A rank's step that computes `actions`."""
    return _Derivation(stage, actions).derive()


@dataclass(slots=True)
class _Derivation:
    """One list of actions.

    needs    by kind of action: where buckets that are gathered after the update are read for the first time
    sums     where buckets that gather all micro-batches are written for the last time
    written  of each bucket: the last action that writes it, its kind, where there
    home     of each bucket: the unit that names its sums, and its number among those of that unit
    summing  buckets whose sum is on the wire, in the order in which it was put there
    """

    stage: Stage
    actions: Sequence[Compute]
    needs: dict[Walk, list[tuple[At, int]]] = field(default_factory=dict[Walk, list[tuple[At, int]]])
    sums: dict[Walk, list[tuple[At, int]]] = field(default_factory=dict[Walk, list[tuple[At, int]]])
    written: dict[int, tuple[int, Walk, At]] = field(default_factory=dict[int, tuple[int, Walk, At]])
    home: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    summing: dict[int, Key] = field(default_factory=dict[int, Key])
    shared: Shared = field(default_factory=Shared)

    def derive(self) -> Derived:
        stage, rule = self.stage, self.stage.rule
        walks: list[Walk] = [(a.kind, a.chunk) for a in self.actions]
        first, last = dict[Walk, int](), dict[Walk, int]()
        for i, walk in enumerate(walks):
            first.setdefault(walk, i)
            last[walk] = i
        self._look(first, last)
        # Ranks that read first and write last in the same places share what they derive.
        places = tuple([(b, walk, at) for b, (_, walk, at) in self.written.items()])
        read = tuple([(walk, tuple(some)) for walk, some in self.needs.items()])
        self.shared = shared = stage.derived.setdefault((places, read), self.shared)
        known, left, runs, before = shared.actions, shared.number(rule.begin()), list[int](), list[int]()
        after = upcoming([stage.walk(walk).turns for walk in walks])
        for i, (walk, following) in enumerate(zip(walks, after, strict=True)):
            before.append(left)
            key = (walk, first[walk] == i, last[walk] == i, left, following)
            found = known.get(key)
            if found is None:
                found = known[key] = self._action(key)
            action, left, sums = found
            if sums:
                self._note(sums)
            runs.append(action)
        across = sorted(b for b in self.written if stage.buckets[b].across_stages)
        events = rule.end(shared.lefts[left], across, lambda b: self.written[b][::2])
        self._note(events)
        opening, closing, update = self._outside(events)
        return Derived(opening, runs, before, closing, update)

    def _look(self, first: Mapping[Walk, int], last: Mapping[Walk, int]) -> None:
        """Where buckets are read first and written last."""
        stage, read, written = self.stage, dict[int, tuple[int, Walk, At]](), self.written
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
        """One action's runs, the number of what it leaves, and its events of sums."""
        walk, first, last, number, following = circumstances
        stage, through, left = self.stage, self.stage.walk(walk), self.shared.lefts[number]
        due = Due(self.needs.get(walk, ()) if first else (), self.sums.get(walk, ()) if last else ())
        before, after, left = stage.rule.action(
            left, through.passing, due, following, lambda b: last and self.written[b][1] == walk
        )
        beside = defaultdict[int, list[tuple[int, int, int]]](list)
        needs, sums = defaultdict[int, tuple[int, ...]](tuple), list[Event]()
        for at, when, events in sorted([(at, when, some) for when, table in enumerate((before, after))
                                        for at, some in table.items()]):  # fmt: skip
            k, pos = int(at[0]), int(at[1])
            unit = through.units[k]
            for event in events:
                if event[0] == "wait_all_gather" and not stage.buckets[event[1]].cut_parameters:
                    beside[k].append((pos, when, self._number(("p", 0, 0, len(needs[k])))))
                    needs[k] += (event[1],)
                elif event[0] != "acquire_gradient_buffer":
                    beside[k].append((pos, when, self._event(event, unit)))
                    if event[0] in ("reduce", "replicate", "wait_reduce_scatter") and stage.buckets[event[1]].summed:
                        sums.append(event)
        if through.arrives != NEVER:  # after what happens to buckets, right before it is read
            beside[0].append((through.arrives, 0, self._number(("m", 0, 0, 0))))
        action = stage.clock.action(repeats(self._row(walk, beside, needs)))
        return action, self.shared.number(left), tuple(sums)

    def _row(self, walk: Walk, beside: Mapping[int, Beside], needs: Mapping[int, tuple[int, ...]]) -> list[Step]:
        row, stage, through = list[Step](), self.stage, self.stage.walk(walk)
        for k, unit in enumerate(through.units):
            lent, whole = through.lent.get(k, ()), k in through.whole
            segment = stage.segment(stage.row[unit], walk[0], beside.get(k, ()), lent, whole=whole)
            row.append((segment, unit, needs.get(k, ())))
        return row

    def _event(self, event: Event, unit: int) -> int:
        """What happens to a bucket in a segment of `unit`, as a number of ops."""
        question, b = event
        own, number = self._gathered(b) if question in ("gather", "wait_all_gather") else self.home[b]
        key = (question, id(self.stage.buckets[b]), own - unit, number)
        found = self.shared.made.get(key)
        return self._number(key, b) if found is None else found

    def _gathered(self, b: int) -> tuple[int, int]:
        unit = self.stage.bucket_plans[b].unit
        return unit, self.stage.rule.cut[unit].index(b)

    def _number(self, key: tuple[str, int, int, int], b: int = NONE) -> int:
        """Ops that are the same for equal buckets as far away."""
        made = self.shared.made
        if key not in made:
            made[key] = len(self.stage.beside)
            self.stage.beside.append(tuple(self._ops(key, b)))
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
        """Keep which sums are on the wire."""
        for question, b in events:
            self.summing.pop(b, None)
            if question != "wait_reduce_scatter" and self.stage.buckets[b].summed:
                self.summing[b] = ("r", *self.home[b])

    # ---- outside of the actions ------------------------------------------------------------------------------

    def _outside(self, events: Sequence[Event]) -> tuple[int, int, Sequence[Step]]:
        """What comes before the actions, after them, and after that. `events`: of buckets after the last action."""
        key = (tuple(events), tuple(self.summing.items()), tuple(self.home.items()))
        if key not in self.shared.outside:
            self.shared.outside[key] = self._outside_of(events)
        return self.shared.outside[key]

    def _outside_of(self, events: Sequence[Event]) -> tuple[int, int, Sequence[Step]]:
        stage, clock = self.stage, self.stage.clock
        before = [self._step(ops) for asked in opening(stage.outside) if (ops := self._asked(asked))]
        rows = [self._step(stage.beside[self._event(event, 0)]) for event in events]
        after, summed = list[Step](), False
        for question, *about in closing(stage.outside, self.summing):
            unit = self.home[about[0]][0] if question == "widen" else about[0] if question == "gather" else 0
            if ops := self._asked((question, *about), unit):
                (after if summed else rows).append(self._step(ops, unit))
            summed = summed or (question == "agree" and about[0].axis == "world")
        return clock.action(repeats(before)), clock.action(repeats(rows)), after

    def _step(self, ops: Sequence[Op], unit: int = 0) -> Step:
        return self.stage.clock.segment(tuple(ops)), unit, ()

    def _asked(self, asked: tuple[Any, ...], unit: int = 0) -> Sequence[Op]:
        """A question of the walk outside of the actions, as ops in a segment of `unit`."""
        stage, make = self.stage, self.stage.ops
        match asked:
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
    """Runs of equal segments; what waits for gathers of the last step stands alone."""
    out, i = list[Run](), 0
    while i < len(row):
        segment, unit, needs = row[i]
        n, step = 1, row[i + 1][1] - unit if i + 1 < len(row) else 0
        while i + n < len(row) and not needs and row[i + n] == (segment, unit + n * step, ()):
            n += 1
        out.append(((row[i],), n, step))
        i += n
    return tuple(out)
