"""Families and rows of layouts that are not estimated yet, the lowest bound first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.config.recompute import NONE
from penteract.planner.search.priced import Priced, unfit
from penteract.planner.search.progress import Pulse
from penteract.planner.search.rows import Branch, Row
from penteract.planner.space.effort import Effort, effort
from penteract.planner.space.layout_families import LayoutFamily
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.units import Seconds

_STILL = Pulse()
_ROUGH, _OF_PASSES, _FITTING = range(3)  # bounds of a row
# Families with the same precision and these in common have passes that others lack.
_SHARED = ("tp", "cp", "cp_method", "pp")
_Passes = tuple[object, ...]
_Serial = tuple[int, int]  # of a family, and of a row in it, from 1; 0 for the whole family


@dataclass(slots=True)
class Frontier:
    """Rows to be priced, and the results so far (`found`). `largest`: an upper limit of the micro-batch size.

    A family waits as a whole, with one bound for all its rows: first by the passes of a simpler mesh, then by its own.
    A row waits with a rough bound, with that of its own passes, and with that of its layouts that may fit, before it is
    priced. `seconds`: rows of layouts with more recomputation than others, which were not priced with them; each with a
    lower bound of its time without any.
    """

    found: Priced = field(default_factory=Priced)
    largest: int = 1
    branches: list[Branch] = field(default_factory=list[Branch])
    seconds: list[tuple[Seconds, Row]] = field(default_factory=list[tuple[Seconds, "Row"]])
    _left: dict[_Serial, Row | Branch] = field(default_factory=dict[_Serial, "Row | Branch"])
    # Of equal bounds, the first family comes first, and its first row. The last number: of a row, which of its bounds
    # this is; of a family, which of its meshes gave it.
    _heap: list[tuple[Seconds, _Serial, int]] = field(default_factory=list[tuple[Seconds, _Serial, int]])
    # Which of its meshes families look at so far, by estimator, tp, cp and cp_method.
    _reached: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    _serial: Iterator[int] = field(default_factory=count)
    _shares: dict[_Passes, int] = field(default_factory=dict["_Passes", int])

    def add(self, families: Iterable[LayoutFamily], prices: Estimator, pulse: Pulse = _STILL) -> None:
        """Add families of one precision."""
        for family in families:
            pulse()
            serial = (next(self._serial), 0)
            branch = Branch(family, prices, serial[0])
            self.branches.append(branch)
            self._left[serial] = branch
            heappush(self._heap, (branch.rough_bound(self.largest, branch.meshes[0]), serial, 0))

    def deal(self, number: int) -> None:
        """Deal the families to so many shares: those with the same passes to one, the fastest evenly to all."""
        least = dict[_Passes, Seconds]()
        for bound, serial, _ in self._heap:
            passes = _passes_of(_branch_of(self._left[serial]))
            least[passes] = min(bound, least.get(passes, inf))
        dealt = [0.0] * number
        for place, passes in enumerate(sorted(least, key=lambda one: least[one]), 1):
            share = self._shares[passes] = dealt.index(min(dealt))
            dealt[share] += place**-0.5  # the faster, the closer a search looks
        for branch in self.branches:
            branch.share = self._shares[_passes_of(branch)]

    def share_of(self, layout: Layout, precision: Policy) -> int:
        """The share of a layout's family; 0 if none were dealt."""
        if not self._shares:
            return 0
        return self._shares.get((precision, *[getattr(layout, name) for name in _SHARED]), 0)

    def keep(self, share: int) -> None:
        """Leave out the families of other shares."""
        self._left = {serial: one for serial, one in self._left.items() if _branch_of(one).share == share}

    @property
    def lowest(self) -> Seconds:
        """A lower bound of the time of all remaining layouts; infinite if there are none."""
        while self._heap and self._heap[0][1] not in self._left:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    @property
    def left(self) -> int:
        """The number of remaining layouts: neither priced nor refused."""
        return sum(map(len, self._left.values()))

    def advance(self) -> None:
        """Price the row with the lowest bound, or put it back with its own bound if that is higher. Of a family, make
        the rows."""
        assert self.lowest < inf
        bound, serial, close = heappop(self._heap)
        waiting = self._left[serial]
        if isinstance(waiting, Branch):
            self._come_closer(waiting, bound, serial, close)
        # Its own bound is that of its fastest layout, fitting or not: so it holds for partial recomputation, too.
        elif close == _ROUGH and (own := waiting.bound()) > bound:
            heappush(self._heap, (own, serial, _OF_PASSES))
        # Layouts with more recomputation than others follow from this row only once it is priced.
        elif close < _FITTING and not waiting.more and (own := waiting.fitting_bound(self.found.usable)) > bound:
            heappush(self._heap, (own, serial, _FITTING))
        elif rest := waiting.price(self.found):
            self._left[serial] = rest
            self.seconds.append((bound, rest))
            heappush(self._heap, (max(bound, rest.rough_bound(self.largest)), serial, _ROUGH))
        else:
            del self._left[serial]

    def _come_closer(self, branch: Branch, bound: Seconds, serial: _Serial, at: int) -> None:
        """Put a family back with the bound of a less simple mesh, if that is higher; or make its rows. Meshes of which
        no family comes so far are never looked at."""
        rest, meshes = branch.family.rest, branch.meshes
        alike = (id(branch.prices), rest["tp"], rest["cp"], rest["cp_method"])
        while at + 1 < len(meshes):
            at = self._reached[alike] = max(at + 1, self._reached.get(alike, 0))
            if (closer := branch.rough_bound(self.largest, meshes[at])) > bound:
                heappush(self._heap, (closer, serial, at))
                return
        self._open(serial, branch)

    def _open(self, serial: _Serial, branch: Branch) -> None:
        """Replace a family by its rows."""
        del self._left[serial]
        for number, row in enumerate(branch.rows(), 1):
            own = (serial[0], number)
            self._left[own] = row
            heappush(self._heap, (row.rough_bound(self.largest), own, _ROUGH))

    def reach(self, layout: Layout, precision: Policy) -> None:
        """Price the row of a layout, if it is still waiting."""
        for serial, branch in [(s, b) for s, b in self._left.items() if isinstance(b, Branch)]:
            if branch.has(layout, precision):
                self._open(serial, branch)
        size = layout.micro_batch_size
        for serial, row in [(s, r) for s, r in self._left.items() if isinstance(r, Row) and r.size == size]:
            if row.branch.has(layout, precision):
                waiting: Row | None = row
                while waiting:
                    waiting = waiting.price(self.found)
                del self._left[serial]

    def simplest(self, precision: Policy, most: Effort | None) -> LayoutEstimate | None:
        """Of layouts that fit, the one with the least effort, if that is less than `most`; regardless of its time."""
        own = [b for b in self.branches if b.prices.policy == precision]
        heap: list[tuple[Effort, int, Branch | tuple[Layout, ...]]] = []
        heap += [(effort(_plainest(b.family)), next(self._serial), b) for b in own]
        heapify(heap)
        while heap and (most is None or heap[0][0] < most):
            _, _, item = heappop(heap)
            runs = item.family.runs() if isinstance(item, Branch) else ()
            if isinstance(item, tuple):
                smallest, *larger = item
                if unfit(own[0].prices, smallest):
                    runs = (tuple(larger),) if larger else ()
                elif estimate := self.found.within(own[0].prices, smallest):  # if it does not fit, larger ones do not
                    return estimate
            for run in runs:
                heappush(heap, (effort(run[0]), next(self._serial), run))
        return None


def _plainest(family: LayoutFamily) -> Layout:
    """A layout with no more effort than any of its family."""
    sizes = [pair for _, pairs in family.members for pair in pairs]
    memory = family.members[0][0]._replace(
        zero=0, shard_group=0, reduce_scatter_once=False, reshard_after_step=False, recompute=NONE,
        offload_optimizer=False
    )  # fmt: skip
    return family.layout(memory, *min(sizes))


def _branch_of(waiting: Row | Branch) -> Branch:
    return waiting if isinstance(waiting, Branch) else waiting.branch


def _passes_of(branch: Branch) -> _Passes:
    return branch.prices.policy, *[branch.family.rest[name] for name in _SHARED]
