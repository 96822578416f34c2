"""Count the bucket plans of each key and size of a rank. Runs of equal units are counted without packing each unit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from penteract.ops.params import Param
from penteract.parallel.bucket_plans import BucketKey, BucketPlan, BucketRules, Filling, FsdpUnit

Counted = tuple[tuple[BucketPlan, int], ...]  # the first plan of each key and size, and how many there are


def count_bucket_plans(rules: BucketRules, runs: Sequence[tuple[FsdpUnit, Sequence[BucketPlan], int]]) -> Counted:
    """Count the plans that `bucket_plans` makes, in its order, each key and size once.

    `runs`: (unit, the plans that are its own, how many equal units are in a row)
    """
    counts, fills, begin = _Counts(), dict[BucketKey, _Fills](), 0
    late = list[tuple[str, int, Param]]()  # parameters of several pipeline ranks come last, in the order of their names
    for unit, alone, n in reversed(runs):
        for i, plan in enumerate(alone, begin):
            counts.add((0, "", i, 0, 0), plan, n)
        packed, some = list(rules.not_per_unit(unit)), dict[BucketKey, list[tuple[int, Param, int]]]()
        for i, p in enumerate(packed, begin):
            key, size = rules.kind(p)
            if turn := rules.sort_key(p):
                late.append((turn, i, p))
            else:
                some.setdefault(key, []).append((i, p, size))
        for key, own in some.items():
            fills.setdefault(key, _Fills.of(rules, key, counts)).run(own, n, len(packed), begin)
        begin += n * len(unit.params)
    for turn, i, p in sorted(late, key=lambda one: one[:2]):
        key, size = rules.kind(p)
        fills.setdefault(key, _Fills.of(rules, key, counts)).run([(i, p, size)], 1, 0, i, turn)
    for last in fills.values():
        last.end()
    return counts.counted()


# The place of a plan in the order of `bucket_plans`: 0 for a unit's own, 1 for those that end in or with a unit, 2 for
# those left at the end, 3 for repeated ones, of which an equal one came before; then the sort key and the place of that
# unit; 0 with the place of its last parameter, if it ends within the unit, or 1 with that of its first.
_Place = tuple[int, str, int, int, int]


@dataclass(slots=True)
class _Counts:
    """Plans by key and size: the first in order, and how many."""

    found: dict[Hashable, tuple[_Place, BucketPlan, int]] = field(
        default_factory=dict[Hashable, tuple[_Place, BucketPlan, int]]
    )

    def add(self, place: _Place, plan: BucketPlan, n: int) -> None:
        first, one, before = self.found.get(plan.kind, (place, plan, 0))
        self.found[plan.kind] = (place, plan, before + n) if place < first else (first, one, before + n)

    def counted(self) -> Counted:
        return tuple([(plan, n) for _, plan, n in sorted(self.found.values(), key=lambda one: one[0])])


@dataclass(slots=True)
class _Fills:
    """The plans that the parameters of one key fill, over all units of a rank."""

    filling: Filling
    enough: int  # elements with which a plan ends where a unit does
    counts: _Counts
    made: list[BucketPlan] = field(default_factory=list[BucketPlan])
    opened: tuple[str, int] = ("", 0)  # the place of the open plan's first parameter

    @staticmethod
    def of(rules: BucketRules, key: BucketKey, counts: _Counts) -> _Fills:
        """Of one key, with no plan open."""
        return _Fills(rules.filling(key, rules.most), rules.enough, counts)

    def run(self, some: Sequence[tuple[int, Param, int]], repeats: int, each: int, begin: int, turn: str = "") -> None:
        """Fill with `repeats` equal units. `some`: (place in the order, parameter, elements) of one unit, which begins
        at place `begin`; those of the next unit come `each` places later. Once the open plan has the same parameters as
        before, the fill repeats."""
        seen, i = dict[Hashable, tuple[int, int]](), 0
        while i < repeats:
            if (begun := seen.get(self.filling.held)) is not None:
                at, before = begun
                turns = (repeats - i) // (i - at)
                for plan in self.made[before:]:
                    self.counts.add((3, "", 0, 0, 0), plan, turns)
                i, self.opened = i + turns * (i - at), (turn, self.opened[1] + turns * (i - at) * each)
                seen = {}
                if i == repeats:
                    break
            seen[self.filling.held] = i, len(self.made)
            for place, p, n in some:
                if not self.filling.params:
                    self.opened = turn, place + i * each
                if plan := self.filling.add(p, n):
                    self._made(plan, (1, turn, begin + i * each, 0, place + i * each))
            if self.filling.params and self.filling.elements >= self.enough:
                self._made(self.filling.close(), (1, turn, begin + i * each, 1, self.opened[1]))
            i += 1

    def end(self) -> None:
        """Close the open plan, if there is one."""
        if self.filling.params:
            turn, place = self.opened
            self.counts.add((2, turn, place, 0, 0), self.filling.close(), 1)

    def _made(self, plan: BucketPlan, place: _Place) -> None:
        self.made.append(plan)
        self.counts.add(place, plan, 1)
