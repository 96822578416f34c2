"""What a pipeline rank does in a step, with its repeats left standing: pieces as ops, and the bucket events that
`step/fsdp.py` puts around their calls. Equal layers in equal circumstances are one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from penteract.estimate.pieces import ENDS, Kind, Piece
from penteract.estimate.time.clock import WAIT, Clock, Key, Op, Run, Runs, Step
from penteract.estimate.time.ops import DATA, ActionOps, BucketOps
from penteract.ops.params import Param
from penteract.parallel.data import NONE, Bucket, Pack
from penteract.schedule.actions import Compute
from penteract.step.agreements import Outside
from penteract.step.fsdp import Due, Event, FsdpRule, Left, Table, Touch, upcoming
from penteract.step.walk import closing, opening

Walk = tuple[str, int]  # kind of an action, chunk
_Touching = tuple[int, tuple[str, ...], bool]  # an instruction's position, its parameters, whether it writes gradients
At = tuple[int, int]  # unit in the order of its action, position of an instruction


_NO_OPS = ActionOps((), (), (), 0)


class Cut(NamedTuple):
    """A bucket as the rule sees it."""

    unit: int
    cut_parameters: bool
    cut_gradients: bool
    shards: int
    replicas: tuple[int, ...]


class Pass(NamedTuple):
    """One kind of action of a chunk.

    units    in the order in which it comes to them
    touches  of parameters and their gradients; `turns`: the units whose cut parameters it reads
    lent     copies of other units that each starts or waits for; `whole`: whether it waits for all of its own
    """

    units: Sequence[int]
    touches: Sequence[Touch]
    turns: tuple[int, ...]
    lent: Mapping[int, tuple[Op, ...]]
    whole: frozenset[int]


@dataclass(slots=True)
class Stage:
    """One rank's program.

    row      the kinds of its units, in the order of forward; `chunks`: the units of each chunk
    pieces   of each kind: the piece, and its ops by action
    packs    whose parameters each of `buckets` has; equal buckets are one object
    owned    the parameters that each unit is the first to use
    places   of the ring of parameters
    outside  what decides its work outside of the tape
    """

    clock: Clock
    ops: BucketOps
    row: Sequence[Kind]
    chunks: Sequence[range]
    pieces: Mapping[Kind, tuple[Piece, Mapping[str, ActionOps]]]
    packs: Sequence[Pack]
    buckets: Sequence[Bucket]
    owned: Sequence[Sequence[Param]]
    places: int
    outside: Outside
    rule: FsdpRule = field(init=False)
    of: dict[tuple[int, str], int] = field(init=False)  # (unit, parameter) -> bucket
    _touching: dict[tuple[Kind, str], Sequence[_Touching]] = field(
        default_factory=dict[tuple[Kind, str], "Sequence[_Touching]"]
    )
    _passes: dict[Walk, Pass] = field(default_factory=dict[Walk, Pass])
    _segments: dict[Any, int] = field(default_factory=dict[Any, int])

    def __post_init__(self) -> None:
        held = [
            Cut(pack.unit, b.cut_parameters, b.cut_gradients, b.shards, b.replicas)
            for pack, b in zip(self.packs, self.buckets, strict=True)
        ]
        self.rule = FsdpRule(held, self.places)
        self.of = dict(self._owners())

    def derive(self, actions: Sequence[Compute]) -> Derived:
        """The runs of every action of a step, in equal circumstances derived once; and what comes after the last."""
        return _Derivation(self, actions).derive()

    def walk(self, walk: Walk) -> Pass:
        """What a kind of action of a chunk goes through."""
        if walk not in self._passes:
            kind, chunk = walk
            units = self.chunks[chunk] if kind == "Fwd" else self.chunks[chunk][::-1]
            touches = [
                Touch((k, pos), tuple(dict.fromkeys([self.of[unit, n] for n in names])), writes)
                for k, unit in enumerate(units)
                for pos, names, writes in self._touches_of(self.row[unit], kind)
            ]
            turns = tuple([unit for _, unit in self.rule.turns(touches)])
            self._passes[walk] = Pass(units, touches, turns, *self._lent(units, kind))
        return self._passes[walk]

    def _lent(self, units: Sequence[int], action: str) -> tuple[Mapping[int, tuple[Op, ...]], frozenset[int]]:
        """Copies to and from the host that a unit makes for its neighbours, by its place; the units that wait for their
        own: of those that leave, the last."""
        having = [k for k, unit in enumerate(units) if self._ops_of(unit, action).moved]
        if not having:
            return {}, frozenset()
        lent = defaultdict[int, tuple[Op, ...]](tuple)

        def lend(of: int, to: int) -> None:
            away = units[of] - units[to]
            lent[to] += tuple([_renamed(op, away) for op in self._ops_of(units[of], action).moved])

        if action != "Fwd":  # what comes back first is asked for at once
            for of, to in zip(having, (0, *having), strict=False):
                lend(of, to)
            return lent, frozenset()
        for of, to in pairwise(having):
            lend(of, to)
        if having[-1] == len(units) - 1:
            return lent, frozenset(having[-1:])
        lend(having[-1], len(units) - 1)
        return lent, frozenset()

    def _ops_of(self, unit: int, action: str) -> ActionOps:
        return self.pieces[self.row[unit]][1].get(action, _NO_OPS)

    def _touches_of(self, kind: Kind, action: str) -> Sequence[_Touching]:
        """Instructions of a piece that touch parameters."""
        key = kind, action
        if key not in self._touching:
            piece = self.pieces[kind][0]
            jobs = [piece.outline.jobs[job] for job, _, _ in piece.outline.calls.get(action, ())]
            self._touching[key] = [
                (pos, piece.sites[place].params, phase == "weight_gradient")
                for pos, (place, phase) in enumerate(jobs)
                if piece.sites[place].params
            ]
        return self._touching[key]

    def _owners(self) -> Iterator[tuple[tuple[int, str], int]]:
        """Layers that are alike share their parameters: packs take them in the order of backward."""
        units, ends = defaultdict[int, list[int]](list), defaultdict[str, list[int]](list)
        for unit in reversed(range(len(self.row))):
            for p in self.owned[unit]:
                units[id(p)].append(unit)
            if self.row[unit] in ENDS:  # two ends may use one table
                for p in self.pieces[self.row[unit]][0].params:
                    ends[p.name].append(unit)
        turn = {p: iter(some) for p, some in units.items()}
        for b, pack in enumerate(self.packs):
            for p in pack.params:
                yield (next(turn[id(p)]), p.name), b
                for other in ends.get(p.name, ()):
                    yield (other, p.name), b

    def segment(
        self, kind: Kind, action: str, beside: Sequence[tuple[int, int, tuple[Op, ...]]], lent: tuple[Op, ...] = (),
        *, whole: bool = False,
    ) -> int:  # fmt: skip
        """A unit's calls with ops before (0) and after (1) some of them, and copies that it makes for its neighbours.

        whole  it waits for all of its own copies, too
        """
        key = (kind, action, tuple(beside), lent, whole)
        if key not in self._segments:
            around, own = {(pos, when): some for pos, when, some in beside}, self.pieces[kind][1].get(action, _NO_OPS)
            ops = [*(lent if action != "Fwd" else ())]
            for pos, some in enumerate(own.every if whole else own.own):
                if pos == own.last and action == "Fwd":
                    ops += lent
                ops += (*around.get((pos, 0), ()), *some, *around.get((pos, 1), ()))
            ops += lent if action == "Fwd" and own.last == len(own.every) else ()
            self._segments[key] = self.clock.segment(tuple(ops))
        return self._segments[key]


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
class _Derivation:
    """The bucket events of one list of actions."""

    stage: Stage
    actions: Sequence[Compute]
    needs: dict[Walk, list[tuple[At, int]]] = field(default_factory=dict[Walk, list[tuple[At, int]]])
    sums: dict[Walk, list[tuple[At, int]]] = field(default_factory=dict[Walk, list[tuple[At, int]]])
    written: dict[int, tuple[int, Walk, At]] = field(default_factory=dict[int, tuple[int, Walk, At]])
    home: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    summing: dict[int, Key] = field(default_factory=dict[int, Key])

    def derive(self) -> Derived:
        stage, rule = self.stage, self.stage.rule
        walks: list[Walk] = [(a.kind, a.chunk) for a in self.actions]
        first, last = dict[Walk, int](), dict[Walk, int]()
        for i, walk in enumerate(walks):
            first.setdefault(walk, i)
            last[walk] = i
        self._look(first, last)
        known = dict[Any, tuple[int, Left, tuple[tuple[str, int], ...]]]()
        left, runs, numbers, before = rule.begin(), list[int](), dict[Left, int](), list[int]()
        after = upcoming([stage.walk(walk).turns for walk in walks])
        for i, (walk, following) in enumerate(zip(walks, after, strict=True)):
            before.append(numbers.setdefault(left, len(numbers)))
            key = (walk, first[walk] == i, last[walk] == i, left, following)
            if key not in known:
                known[key] = self._action(*key)
            action, left, told = known[key]
            self._note(told)
            runs.append(action)
        shared = sorted(b for b in self.written if stage.buckets[b].across_stages)
        events = rule.end(left, shared, lambda b: self.written[b][::2])
        self._note(events)
        opening, closing, update = self._outside(events)
        return Derived(opening, runs, before, closing, update)

    def _outside(self, events: Sequence[Event]) -> tuple[int, int, list[Step]]:
        """What comes before the actions, after them, and after the sum over the world; `events`: of buckets after the
        last of them."""
        stage, clock = self.stage, self.stage.clock
        before = [self._row(ops) for asked in opening(stage.outside) if (ops := self._asked(asked))]
        rows = [self._row(self._ops(event, 0)[0]) for event in events]
        after, summed = list[Step](), False
        for question, *about in closing(stage.outside, self.summing):
            unit = self.home[about[0]][0] if question == "widen" else about[0] if question == "gather" else 0
            if ops := self._asked((question, *about), unit):
                (after if summed else rows).append((clock.segment(tuple(ops)), unit, ()))
            summed = summed or (question == "agree" and about[0].axis == "world")
        return clock.action(repeats(before)), clock.action(repeats(rows)), after

    def _row(self, ops: Sequence[Op]) -> Step:
        return self.stage.clock.segment(tuple(ops)), 0, ()

    def _asked(self, asked: tuple[Any, ...], unit: int = 0) -> Sequence[Op]:
        """A question of the walk outside of the actions, as ops in a segment of `unit`."""
        stage, make = self.stage, self.stage.ops
        match asked:
            case ("begin",):
                return [make.largest(b) for b in stage.buckets if b.gathered_as == "code"]
            case ("agree", agreement):
                return make.agree(agreement)
            case ("widen", b):
                return list(make.widen(stage.buckets[b], self._sum_key(b, unit)))
            case ("measure", b):
                return [make.measure(stage.buckets[b])]
            case ("update", b):
                return list(make.update(b))
            case ("gather", b):
                return list(make.gather(stage.buckets[b], ("u", 0, 0)))
            case ("end",):
                return list(make.end())
            case _:
                return ()

    def _look(self, first: Mapping[Walk, int], last: Mapping[Walk, int]) -> None:
        """Where buckets are read first and written last."""
        stage, read = self.stage, dict[int, tuple[int, Walk, At]]()
        for walk in first:
            for at, own, writes, _ in stage.walk(walk).touches:
                for b in own:
                    if not writes and stage.buckets[b].gathered_after_update:
                        if b not in read or first[walk] < read[b][0]:
                            read[b] = first[walk], walk, at
                    elif writes and (b not in self.written or (last[walk], at) >= self.written[b][::2]):
                        self.written[b] = last[walk], walk, at
        for b, (_, walk, at) in read.items():
            self.needs.setdefault(walk, []).append((at, b))
        count = defaultdict[int, int](int)
        for b, (_, walk, at) in sorted(self.written.items(), key=lambda item: (item[1][0], item[1][2], item[0])):
            bucket, unit = stage.buckets[b], stage.packs[b].unit
            if unit == NONE or not bucket.cut_gradients:
                unit = stage.walk(walk).units[at[0]]
                if not bucket.across_stages:
                    self.sums.setdefault(walk, []).append((at, b))
            self.home[b] = unit, count[unit]
            count[unit] += 1

    def _action(
        self, walk: Walk, first: bool, last: bool, left: Left, following: int
    ) -> tuple[int, Left, tuple[Event, ...]]:  # fmt: skip
        """One action, from what is left by those before."""
        stage, through = self.stage, self.stage.walk(walk)
        due = Due(self.needs.get(walk, ()) if first else (), self.sums.get(walk, ()) if last else ())
        before, after, left = stage.rule.action(
            left, through.touches, due, following, lambda b: last and self.written[b][1] == walk
        )
        beside = defaultdict[int, list[tuple[int, int, tuple[Op, ...]]]](list)
        needs, told = defaultdict[int, tuple[int, ...]](tuple), list[Event]()
        for at, when, events in sorted(_both(before, after)):
            k, pos = at
            unit, ops = through.units[k], list[Op]()
            for event in events:
                some, needed = self._ops(event, unit, len(needs[k]))
                ops += some
                needs[k] += needed
                if event[0] in ("reduce", "replicate", "land"):
                    told.append(event)
            if ops:
                beside[k].append((pos, when, tuple(ops)))
        row = list[Step]()
        for k, unit in enumerate(through.units):
            lent, whole = through.lent.get(k, ()), k in through.whole
            row.append((stage.segment(stage.row[unit], walk[0], beside[k], lent, whole=whole), unit, needs[k]))
        return stage.clock.action(repeats(row)), left, tuple(told)

    def _ops(self, event: Event, unit: int, needed: int = 0) -> tuple[Sequence[Op], tuple[int, ...]]:
        """An event in a segment of `unit`, as ops; and the bucket that it waits for, gathered after the last update."""
        question, b = event
        bucket, make = self.stage.buckets[b], self.stage.ops
        match question:
            case "gather":
                return tuple(make.gather(bucket, self._gather_key(b, unit))), ()
            case "need" if bucket.cut_parameters:
                return ((WAIT, self._gather_key(b, unit), DATA, "wait parameters"),), ()
            case "need":
                return ((WAIT, ("p", 0, needed), DATA, "wait parameters"),), (b,)
            case "reduce":
                return tuple(make.reduce(bucket, self._sum_key(b, unit))), ()
            case "land":
                return tuple(make.land(bucket, self._sum_key(b, unit))), ()
            case "replicate":
                key = self._sum_key(b, unit)
                return tuple(make.replicate(bucket, key, key)), ()
            case _:
                return (), ()

    def _gather_key(self, b: int, unit: int) -> Key:
        own = self.stage.packs[b].unit
        return "g", own - unit, self.stage.rule.cut[own].index(b)

    def _sum_key(self, b: int, unit: int) -> Key:
        home, number = self.home[b]
        return "r", home - unit, number

    def _note(self, events: Sequence[Event]) -> None:
        """Keep which sums are on the wire, in the order in which they were put there."""
        for question, b in events:
            if question == "land":
                self.summing.pop(b, None)
            elif len(self.stage.buckets[b].holders) > 1:
                self.summing.pop(b, None)
                self.summing[b] = self._sum_key(b, 0)


def _renamed(op: Op, away: int) -> Op:
    """An op of another unit, `away` from this one."""
    place = 1 if op[0] == WAIT else 3
    word, unit, number = op[place]
    return (*op[:place], (word, unit + away, number), *op[place + 1 :])


def _both(before: Table, after: Table) -> Iterator[tuple[At, int, Sequence[Event]]]:
    for when, events in enumerate((before, after)):
        for at, some in events.items():
            if some:
                yield at, when, some


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
