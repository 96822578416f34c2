"""The best layouts of very many, exactly: priced, and simulated, from the lowest bound up.

What passes take bounds the time of all layouts that share them, before any is priced; an estimate's `at_least` bounds
its simulated time. So once the k-th best simulated time lies below every bound that is left, no layout that is left can
be among the best k (branch and bound): it is neither priced nor simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor, inf, log10

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.planner.search.frontier import Frontier
from penteract.planner.search.progress import Progress, Pulse
from penteract.planner.search.rows import NEEDLESS, TOO_LARGE, Higher, Slower, unfit
from penteract.planner.space.effort import Effort, effort
from penteract.readings.estimator import Estimator, LayoutEstimate, StepTime
from penteract.units import Seconds

Order = tuple[Seconds, Effort, Seconds]


@dataclass(frozen=True, slots=True)
class Timed:
    """A layout with its price and its simulated step."""

    estimate: LayoutEstimate
    time: StepTime

    @property
    def layout(self) -> Layout:
        """The layout of the estimate."""
        return self.estimate.layout

    @property
    def order(self) -> Order:
        """By time to four digits; among equals the simpler first."""
        return four_digits(self.time.seconds), effort(self.layout), self.time.seconds


@dataclass(slots=True)
class Search:
    """Best layouts, of those that are priced and of the frontier; a layout is simulated once however many searches ask.

    `estimators` by precision.
    """

    estimators: Mapping[Policy, Estimator]
    frontier: Frontier = field(default_factory=Frontier)
    pulse: Pulse = field(default_factory=Pulse)
    _times: dict[tuple[Layout, Policy], Timed] = field(default_factory=dict[tuple[Layout, Policy], Timed], repr=False)
    _higher: dict[Higher, LayoutEstimate | None] = field(
        default_factory=dict[Higher, "LayoutEstimate | None"], repr=False
    )
    _closer: dict[tuple[Layout, Policy], list[Seconds]] = field(
        default_factory=dict[tuple[Layout, Policy], "list[Seconds]"], repr=False
    )
    adopted: list[LayoutEstimate] = field(default_factory=list[LayoutEstimate])  # of a higher stage than they need
    _rankings: dict[int, Ranking] = field(default_factory=dict[int, "Ranking"], repr=False)

    @property
    def estimates(self) -> list[LayoutEstimate]:
        """Of those that are priced and fit."""
        return self.frontier.found.fits

    @property
    def simulated(self) -> int:
        """How many layouts were."""
        return len(self._times)

    def add(self, estimate: LayoutEstimate) -> None:
        """One more to choose among."""
        self.estimates.append(estimate)

    def find(self, layout: Layout, precision: Policy) -> LayoutEstimate | None:
        """The estimate of a layout that is tried and fits, if nothing simpler makes it needless."""
        self.frontier.reach(layout, precision)
        return next((q for q in self.estimates if q.layout == layout and q.precision == precision), None)

    def simplest(self, precision: Policy) -> LayoutEstimate:
        """Of what fits, if anything does."""
        own = (q for q in self.estimates if q.precision == precision)
        known = min(own, key=lambda q: (effort(q.layout), q.allocated))
        return self.frontier.simplest(precision, effort(known.layout)) or known

    def timed(self, estimate: LayoutEstimate) -> Timed:
        """The estimate with its simulated step; each layout is simulated once in each precision."""
        key = estimate.layout, estimate.precision
        if key not in self._times:
            self._times[key] = Timed(estimate, self.estimators[estimate.precision].time(estimate))
        return self._times[key]

    def closer(self, estimate: LayoutEstimate, than: Seconds) -> Seconds:
        """A bound above `than`, the closest if none is; its time, if that is known."""
        key, prices = (estimate.layout, estimate.precision), self.estimators[estimate.precision]
        if key in self._times:
            return self._times[key].time.seconds
        bounds, known = (prices.closer, prices.first), self._closer.setdefault(key, [estimate.at_least])
        while known[-1] <= than and len(known) <= len(bounds):
            known.append(max(known[-1], bounds[len(known) - 1](estimate)))
        return known[-1]

    def best(
        self,
        k: int,
        *,
        among: Callable[[LayoutEstimate], bool] | None = None,
        kind: Callable[[LayoutEstimate], Hashable] | None = None,
        slower_too: bool = False,
    ) -> list[Timed]:
        """The `k` fastest, one of each `kind`, fastest first. Exact: nothing is sampled.

        Of all that are found, the search goes on where it stopped when it was asked last.
        """
        if among or kind or slower_too:
            return Ranking(self, k, among or (lambda _: True), kind or _itself, slower_too).best()
        if k not in self._rankings:
            self._rankings[k] = Ranking(self, k)
        return self._rankings[k].best()

    def so_far(self, k: int) -> list[Timed]:
        """The `k` best of what has been looked at, fastest first. What was timed for another's sake counts too, where
        nothing else was."""
        found = self._rankings[k].so_far if k in self._rankings else []
        return found or sorted(self._times.values(), key=lambda timed: timed.order)[:k]

    def progress(self, seconds: Seconds, layouts: int, k: int) -> Progress:
        """How far a search for the `k` best of so many layouts has come in so many seconds."""
        best, found = self.so_far(k), self.frontier.found
        return Progress(seconds, found.count, layouts - found.fit - found.refused.total(), best[0] if best else None)

    def estimate(self, item: LayoutEstimate | Slower | Higher) -> LayoutEstimate | None:
        """Of what is found, if it fits."""
        if isinstance(item, Slower):
            return self.estimators[item.precision].estimate(item.layout)
        if isinstance(item, Higher):
            if item not in self._higher:
                self._higher[item] = self._first(item)
            return self._higher[item]
        return item

    def _first(self, item: Higher) -> LayoutEstimate | None:
        """Of the options of a higher stage, the first that fits."""
        found, told = self.frontier.found, item.between
        if not told:
            found.refused[NEEDLESS] -= 1
        for layout in item.options:
            if told:
                told.tried += 1
            why = unfit(item.prices, layout)
            if not why and (estimate := found.within(item.prices, layout)):
                found.refused[NEEDLESS] += 1
                return estimate
            found.refused[why or TOO_LARGE] += 1
        return None

    def _as_fast(self, low: LayoutEstimate | Higher, seconds: Seconds) -> bool:
        """Whether it fits, and takes no longer."""
        if four_digits(low.at_least) > seconds or (estimate := self.estimate(low)) is None:
            return False
        if four_digits(estimate.at_least) > seconds or four_digits(self.closer(estimate, seconds)) > seconds:
            return False
        return four_digits(self.timed(estimate).time.seconds) <= seconds

    def adopt(self, item: Higher, timed: Timed) -> bool:
        """Whether a higher stage is faster than all lower ones that fit: then it is one of those to choose among."""
        seconds = four_digits(timed.time.seconds)
        if any(self._as_fast(low, seconds) for low in item.lower):
            return False
        if timed.estimate not in self.adopted:
            self.adopted.append(timed.estimate)
            self.frontier.found.refused[NEEDLESS] -= 1
            self.add(timed.estimate)
            if item.between:
                item.between.fit += 1
        return True


def _itself(estimate: LayoutEstimate) -> Hashable:
    return estimate.layout, estimate.precision


# Where a layout stands: its order, then its lower bound, then its serial.
_Place = tuple[Order, Seconds, int]
# A bound, its serial, the first bound that it had.
_Waiting = tuple[Seconds, int, Seconds, LayoutEstimate | Slower | Higher]


@dataclass(slots=True)
class Ranking:
    """The `k` best of a search, one of each `kind`, so far as it has come.

    What is found waits with its bound, and again with a closer one, and is taken from the lowest up until the k-th best
    lies below all that wait. Whatever was passed over stays so when more is found: the k-th best only becomes faster.
    """

    search: Search
    k: int
    among: Callable[[LayoutEstimate], bool] = lambda _: True
    kind: Callable[[LayoutEstimate], Hashable] = _itself
    slower_too: bool = False
    _found: dict[Hashable, tuple[_Place, Timed]] = field(default_factory=dict[Hashable, tuple[_Place, Timed]])
    _last: Seconds = inf  # of the k-th, to four digits
    _waiting: list[_Waiting] = field(default_factory=list[_Waiting])
    _taken: tuple[int, int, int] = (0, 0, 0)  # of what was found: estimates, and those left without a price
    _serial: Iterator[int] = field(default_factory=count)

    def best(self) -> list[Timed]:
        """The best of all that are found by now, and of the frontier. Fastest first."""
        frontier, pulse = self.search.frontier, self.search.pulse
        while True:
            pulse()
            self._take()
            known = self._waiting[0][0] if self._waiting else inf
            bound = min(known, frontier.lowest)
            if bound == inf or four_digits(bound) > self._last:
                return self.so_far
            if known < frontier.lowest:
                self._consider(*heappop(self._waiting))
            else:
                frontier.advance()

    @property
    def so_far(self) -> list[Timed]:
        """Fastest first."""
        return [timed for _, timed in sorted(self._found.values(), key=lambda one: one[0])]

    def _take(self) -> None:
        """What was found since the last time."""
        found, (estimates, slower, higher) = self.search.frontier.found, self._taken
        for estimate in found.fits[estimates:]:
            self._wait(estimate.at_least, estimate)
        for other in found.slower[slower:] if self.slower_too else ():
            self._wait(other.bound, other)
        for one in found.higher[higher:]:
            self._wait(one.at_least, one)
        self._taken = len(found.fits), len(found.slower), len(found.higher)

    def _wait(self, bound: Seconds, item: LayoutEstimate | Slower | Higher) -> None:
        heappush(self._waiting, (bound, next(self._serial), bound, item))

    def _consider(self, known: Seconds, serial: int, bound: Seconds, item: LayoutEstimate | Slower | Higher) -> None:
        search = self.search
        estimate = search.estimate(item)
        if estimate is None or not self.among(estimate) or four_digits(estimate.at_least) > self._last:
            return
        if (closer := search.closer(estimate, known)) > known:
            heappush(self._waiting, (closer, serial, bound, item))
            return
        now, key = search.timed(estimate), self.kind(estimate)
        if four_digits(now.time.seconds) > self._last:
            return
        if isinstance(item, Higher) and not search.adopt(item, now) and not self.slower_too:
            return
        place = now.order, bound, serial
        if key in self._found and self._found[key][0] <= place:
            return
        self._found[key] = place, now
        if len(self._found) > self.k:
            del self._found[max(self._found, key=lambda one: self._found[one][0])]
        if len(self._found) == self.k:
            self._last = max(self._found.values(), key=lambda one: one[0])[0][0][0]


def four_digits(seconds: Seconds) -> Seconds:
    """Rounded down: an order on these is one on seconds, and differences below what a model resolves are none."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(seconds)) - 3)
    return floor(seconds / unit) * unit
