"""How many bucket plans of each kind and size units fill that are equal, in a row: without rules them one by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from penteract.ops.params import Param
from penteract.parallel.data import BucketKey, BucketPlan, BucketRules, Filling, Unit

Counted = tuple[tuple[BucketPlan, int], ...]  # of those of one kind and size the first, and how many there are


def count_bucket_plans(rules: BucketRules, runs: Sequence[tuple[Unit, Sequence[BucketPlan], int]]) -> Counted:
    """What `bucket plans` makes of units, with those of each alone, of which so many in a row are equal: in its order,
    each kind and size once."""
    counts, fills, begin = _Counts(), dict[BucketKey, _Fills](), 0
    late = list[tuple[str, int, Param]]()  # several stages have these: they are the last, in the order of their names
    for unit, alone, n in reversed(runs):
        for i, plan in enumerate(alone, begin):
            counts.add((0, "", i), plan, n)
        whole, some = list(rules.not_per_unit(unit)), dict[BucketKey, list[tuple[int, Param, int]]]()
        for i, p in enumerate(whole, begin):
            key, size = rules.kind(p)
            if turn := rules.sort_key(p):
                late.append((turn, i, p))
            else:
                some.setdefault(key, []).append((i, p, size))
        for key, own in some.items():
            fills.setdefault(key, _Fills(Filling(key, rules.limit), counts)).run(own, n, len(whole))
        begin += n * len(unit.params)
    for turn, i, p in sorted(late, key=lambda one: one[:2]):
        key, size = rules.kind(p)
        fills.setdefault(key, _Fills(Filling(key, rules.limit), counts)).run([(i, p, size)], 1, 0, turn)
    for last in fills.values():
        last.end()
    return counts.told()


_Place = tuple[int, str, int]  # where in the order of `bucket plans`: of units, as they fill, those left at the end


@dataclass(slots=True)
class _Counts:
    """Packs by kind and size: the first in the order, and how many."""

    found: dict[Hashable, tuple[_Place, BucketPlan, int]] = field(
        default_factory=dict[Hashable, tuple[_Place, BucketPlan, int]]
    )

    def add(self, place: _Place, plan: BucketPlan, n: int) -> None:
        first, one, before = self.found.get(plan.kind, (place, plan, 0))
        self.found[plan.kind] = (place, plan, before + n) if place < first else (first, one, before + n)

    def told(self) -> Counted:
        return tuple([(plan, n) for _, plan, n in sorted(self.found.values(), key=lambda one: one[0])])


@dataclass(slots=True)
class _Fills:
    """The bucket plans that parameters of one kind fill over a rank."""

    filling: Filling
    counts: _Counts
    made: list[BucketPlan] = field(default_factory=list[BucketPlan])
    opened: tuple[str, int] = ("", 0)  # where what is open begins

    def run(self, some: Sequence[tuple[int, Param, int]], repeats: int, each: int, turn: str = "") -> None:
        """`some`: of one unit, each with its place in the order and its elements; those of the next units come `each`
        places later. Once what is open has been open before, what follows is what followed then."""
        seen, i = dict[Hashable, tuple[int, int]](), 0
        while i < repeats:
            if (begun := seen.get(self.filling.held)) is not None:
                at, before = begun
                turns = (repeats - i) // (i - at)
                for plan in self.made[before:]:
                    self.counts.add((2, "", 0), plan, turns)
                i, self.opened = i + turns * (i - at), (turn, self.opened[1] + turns * (i - at) * each)
                seen = {}
                if i == repeats:
                    break
            seen[self.filling.held] = i, len(self.made)
            for place, p, n in some:
                if not self.filling.params:
                    self.opened = turn, place + i * each
                if plan := self.filling.add(p, n):
                    self.made.append(plan)
                    self.counts.add((1, turn, place + i * each), plan, 1)
            i += 1

    def end(self) -> None:
        """What is open is a plan too."""
        if self.filling.params:
            self.counts.add((2, *self.opened), self.filling.close(), 1)
