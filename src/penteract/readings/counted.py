"""How many packs of each kind and size units fill that are equal, in a row: without packing them one by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from penteract.ops.params import Param
from penteract.parallel.data import Alike, BucketRules, Filling, Pack, Unit

Counted = tuple[tuple[Pack, int], ...]  # of those of one kind and size the first, and how many there are


def count_packs(packing: BucketRules, runs: Sequence[tuple[Unit, Sequence[Pack], int]]) -> Counted:
    """What `packs` makes of units, with those of each alone, of which so many in a row are equal: in its order, each
    kind and size once."""
    counts, fills, begin = _Counts(), dict[Alike, _Fills](), 0
    late = list[tuple[str, int, Param]]()  # several stages have these: they are the last, in the order of their names
    for unit, alone, n in reversed(runs):
        for i, pack in enumerate(alone, begin):
            counts.add((0, "", i), pack, n)
        whole, some = list(packing.beyond(unit)), dict[Alike, list[tuple[int, Param, int]]]()
        for i, p in enumerate(whole, begin):
            alike, size = packing.kind(p)
            if turn := packing.turn(p):
                late.append((turn, i, p))
            else:
                some.setdefault(alike, []).append((i, p, size))
        for alike, own in some.items():
            fills.setdefault(alike, _Fills(Filling(alike, packing.limit), counts)).run(own, n, len(whole))
        begin += n * len(unit.params)
    for turn, i, p in sorted(late, key=lambda one: one[:2]):
        alike, size = packing.kind(p)
        fills.setdefault(alike, _Fills(Filling(alike, packing.limit), counts)).run([(i, p, size)], 1, 0, turn)
    for last in fills.values():
        last.end()
    return counts.told()


_Place = tuple[int, str, int]  # where in the order of `packs`: of units, as they fill, those left at the end


@dataclass(slots=True)
class _Counts:
    """Packs by kind and size: the first in the order, and how many."""

    found: dict[Hashable, tuple[_Place, Pack, int]] = field(default_factory=dict[Hashable, tuple[_Place, Pack, int]])

    def add(self, place: _Place, pack: Pack, n: int) -> None:
        first, one, before = self.found.get(pack.kind, (place, pack, 0))
        self.found[pack.kind] = (place, pack, before + n) if place < first else (first, one, before + n)

    def told(self) -> Counted:
        return tuple([(pack, n) for _, pack, n in sorted(self.found.values(), key=lambda one: one[0])])


@dataclass(slots=True)
class _Fills:
    """The packs that parameters of one kind fill over a rank."""

    filling: Filling
    counts: _Counts
    made: list[Pack] = field(default_factory=list[Pack])
    opened: tuple[str, int] = ("", 0)  # where what is open begins

    def run(self, some: Sequence[tuple[int, Param, int]], repeats: int, each: int, turn: str = "") -> None:
        """`some`: of one unit, each with its place in the order and its elements; those of the next units come `each`
        places later. Once what is open has been open before, what follows is what followed then."""
        seen, i = dict[Hashable, tuple[int, int]](), 0
        while i < repeats:
            if (begun := seen.get(self.filling.held)) is not None:
                at, before = begun
                turns = (repeats - i) // (i - at)
                for pack in self.made[before:]:
                    self.counts.add((2, "", 0), pack, turns)
                i, self.opened = i + turns * (i - at), (turn, self.opened[1] + turns * (i - at) * each)
                seen = {}
                if i == repeats:
                    break
            seen[self.filling.held] = i, len(self.made)
            for place, p, n in some:
                if not self.filling.params:
                    self.opened = turn, place + i * each
                if pack := self.filling.add(p, n):
                    self.made.append(pack)
                    self.counts.add((1, turn, place + i * each), pack, 1)
            i += 1

    def end(self) -> None:
        """What is open is a pack too."""
        if self.filling.params:
            self.counts.add((2, *self.opened), self.filling.close(), 1)
