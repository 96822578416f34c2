"""The best layouts of very many, exactly, by branch and bound: layouts are estimated and simulated in the order of
their lower bounds.

The seconds of passes bound the time of all layouts that share them; an estimate's `at_least` bounds its simulated time.
Once the k-th best simulated time is below every remaining bound, no remaining layout can be among the best k: it is
neither estimated nor simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor, inf, log10
from typing import Protocol

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.planner.search.frontier import Frontier
from penteract.planner.search.priced import NEEDLESS, TOO_LARGE, Higher, Slower, unfit
from penteract.planner.search.progress import Progress, Pulse
from penteract.planner.search.shared_values import ComputedHere, T, Values, value
from penteract.planner.space.effort import Effort, effort
from penteract.readings.estimator import Estimator, LayoutEstimate, StepTime
from penteract.units import Seconds

Order = tuple[Seconds, Effort, Seconds]


@dataclass(frozen=True, slots=True)
class Timed:
    """A layout with its estimate and its simulated step."""

    estimate: LayoutEstimate
    time: StepTime

    @property
    def layout(self) -> Layout:
        """The layout of the estimate."""
        return self.estimate.layout

    @property
    def order(self) -> Order:
        """By time to four digits; among equal ones the simpler first."""
        return four_digits(self.time.seconds), effort(self.layout), self.time.seconds


class LayoutSource(Protocol):
    """Layouts that are not estimated yet: those of the frontier, or others that follow from them."""

    @property
    def lowest(self) -> Seconds:
        """A lower bound of the time of all that remain; infinite if there are none."""
        ...

    def advance(self) -> None:
        """Look at those with the lowest bound."""
        ...


@dataclass(slots=True)
class Search:
    """Finds the best of the estimated layouts and of the frontier. A layout is simulated only once for all rankings.

    `estimators` by precision; `others`: sources in addition to the frontier.
    """

    estimators: Mapping[Policy, Estimator]
    frontier: Frontier = field(default_factory=Frontier)
    others: tuple[LayoutSource, ...] = ()
    values: Values = field(default_factory=ComputedHere)
    pulse: Pulse = field(default_factory=Pulse)
    _times: dict[tuple[Layout, Policy], Timed] = field(default_factory=dict[tuple[Layout, Policy], Timed], repr=False)
    _higher: dict[Higher, LayoutEstimate | None] = field(
        default_factory=dict[Higher, "LayoutEstimate | None"], repr=False
    )
    _closer: dict[tuple[Layout, Policy], list[Seconds]] = field(
        default_factory=dict[tuple[Layout, Policy], "list[Seconds]"], repr=False
    )
    adopted: list[LayoutEstimate] = field(default_factory=list[LayoutEstimate])  # of a higher ZeRO stage than needed
    _rankings: dict[int, Ranking] = field(default_factory=dict[int, "Ranking"], repr=False)

    def use(self, values: Values) -> None:
        """Take values from there from now on."""
        self.values = values
        for branch in self.frontier.branches:
            branch.values = values

    @property
    def estimates(self) -> list[LayoutEstimate]:
        """The estimates of layouts that fit."""
        return self.frontier.found.fits

    @property
    def sources(self) -> tuple[LayoutSource, ...]:
        """All that the layouts come from."""
        return self.frontier, *self.others

    @property
    def simulated(self) -> int:
        """How many layouts were simulated."""
        return len(self._times)

    def add(self, estimate: LayoutEstimate) -> None:
        """Add a layout to choose from."""
        self.estimates.append(estimate)

    def find(self, layout: Layout, precision: Policy) -> LayoutEstimate | None:
        """The estimate of a layout, if it is in the search space, fits, and is not needless."""
        self.frontier.reach(layout, precision)
        return next((q for q in self.estimates if q.layout == layout and q.precision == precision), None)

    def simplest(self, precision: Policy) -> LayoutEstimate:
        """The simplest layout that fits; something must fit."""
        own = (q for q in self.estimates if q.precision == precision)
        found = min(own, key=lambda q: (effort(q.layout), q.allocated))
        return self.frontier.simplest(precision, effort(found.layout)) or found

    def timed(self, estimate: LayoutEstimate) -> Timed:
        """The estimate with its simulated step; each layout is simulated once in each precision."""
        key = estimate.layout, estimate.precision
        if key not in self._times:
            prices = self.estimators[estimate.precision]
            self._times[key] = Timed(estimate, self._value(estimate, "time", lambda: prices.time(estimate)))
        return self._times[key]

    def closer(self, estimate: LayoutEstimate, than: Seconds) -> Seconds:
        """A lower bound above `than`, or the closest one if none is above. The simulated time, if there is one."""
        key, prices = (estimate.layout, estimate.precision), self.estimators[estimate.precision]
        if key in self._times:
            return self._times[key].time.seconds
        bounds, found = (prices.played, prices.closer, prices.first), self._closer.setdefault(key, [estimate.at_least])
        while found[-1] <= than and len(found) <= len(bounds):
            at = len(found) - 1
            found.append(max(found[-1], self._value(estimate, str(at), lambda at=at: bounds[at](estimate))))
        return found[-1]

    def _value(self, estimate: LayoutEstimate, name: str, compute: Callable[[], T]) -> T:
        """A value of a layout: from whom it is known, or computed."""
        layout, precision = estimate.layout, estimate.precision
        key = name, layout, [*self.estimators].index(precision)
        return value(self.values, self.frontier.share_of(layout, precision), key, compute)

    def best(
        self,
        k: int,
        *,
        among: Callable[[LayoutEstimate], bool] | None = None,
        kind: Callable[[LayoutEstimate], Hashable] | None = None,
        slower_too: bool = False,
    ) -> list[Timed]:
        """The `k` fastest, one of each `kind`, fastest first. Exact: nothing is sampled.

        among       a filter of estimates
        slower_too  whether layouts with more recomputation than needed are included

        Without these arguments, the search continues where the last call stopped.
        """
        if among or kind or slower_too:
            return Ranking(self, k, among or (lambda _: True), kind or _itself, slower_too).best()
        if k not in self._rankings:
            self._rankings[k] = Ranking(self, k)
        return self._rankings[k].best()

    def so_far(self, k: int) -> list[Timed]:
        """The `k` best so far, fastest first. If the ranking has none yet, layouts that were simulated for other
        reasons."""
        found = self._rankings[k].so_far if k in self._rankings else []
        return found or sorted(self._times.values(), key=lambda timed: timed.order)[:k]

    def progress(self, seconds: Seconds, layouts: int, k: int) -> Progress:
        """The progress of a search for the `k` best of `layouts` layouts, after `seconds`."""
        best, found = self.so_far(k), self.frontier.found
        return Progress(seconds, found.count, layouts - found.fit - found.refused.total(), best[0] if best else None)

    def estimate(self, item: LayoutEstimate | Slower | Higher) -> LayoutEstimate | None:
        """The estimate of an item, if it fits."""
        if isinstance(item, Slower):
            return self.estimators[item.precision].estimate(item.layout)
        if isinstance(item, Higher):
            if item not in self._higher:
                self._higher[item] = self._first(item)
            return self._higher[item]
        return item

    def _first(self, item: Higher) -> LayoutEstimate | None:
        """The first option of a higher stage that fits."""
        found, counts = self.frontier.found, item.between
        if not counts:
            found.refused[NEEDLESS] -= 1
        for layout in item.options:
            if counts:
                counts.tried += 1
            why = unfit(item.prices, layout)
            if not why and (estimate := found.within(item.prices, layout)):
                found.refused[NEEDLESS] += 1
                return estimate
            found.refused[why or TOO_LARGE] += 1
        return None

    def _as_fast(self, low: LayoutEstimate | Higher, seconds: Seconds) -> bool:
        """Whether a layout fits and takes at most `seconds`."""
        if four_digits(low.at_least) > seconds or (estimate := self.estimate(low)) is None:
            return False
        if four_digits(estimate.at_least) > seconds or four_digits(self.closer(estimate, seconds)) > seconds:
            return False
        return four_digits(self.timed(estimate).time.seconds) <= seconds

    def beaten(self, item: Higher, bound: Seconds) -> bool:
        """Whether a lower stage that fits is known to take no longer than `bound`, a lower bound of this one: then this
        one is not listed, and need not be simulated."""
        for low in item.lower:
            estimate = self._higher.get(low) if isinstance(low, Higher) else low
            timed = estimate and self._times.get((estimate.layout, estimate.precision))
            if timed and four_digits(timed.time.seconds) <= four_digits(bound):
                return True
        return False

    def adopt(self, item: Higher, timed: Timed) -> bool:
        """Whether a higher stage is faster than all lower ones that fit. If so, it is added to the estimates."""
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


# The place of a layout in a ranking: its order, then its lower bound, then its serial.
_Place = tuple[Order, Seconds, int]
# The present bound, the serial, the first bound, the item.
_Waiting = tuple[Seconds, int, Seconds, LayoutEstimate | Slower | Higher]


@dataclass(slots=True)
class Ranking:
    """The `k` best of a search, one of each `kind`, up to its present state.

    Found layouts wait in a heap by their bound, and again by a closer one. They are taken from the lowest up, until the
    k-th best is below all that wait. A rejected layout stays rejected: the k-th best only becomes faster.
    """

    search: Search
    k: int
    among: Callable[[LayoutEstimate], bool] = lambda _: True
    kind: Callable[[LayoutEstimate], Hashable] = _itself
    slower_too: bool = False
    _found: dict[Hashable, tuple[_Place, Timed]] = field(default_factory=dict[Hashable, tuple[_Place, Timed]])
    _last: Order = (inf, (), inf)  # of the k-th
    _waiting: list[_Waiting] = field(default_factory=list[_Waiting])
    _taken: tuple[int, int, int] = (0, 0, 0)  # how many of `fits`, `slower` and `higher` are in the heap already
    _serial: Iterator[int] = field(default_factory=count)

    def best(self) -> list[Timed]:
        """The best of all found layouts and of all sources, fastest first."""
        sources, pulse, values = self.search.sources, self.search.pulse, self.search.values
        while True:
            pulse()
            self._take()
            lowest = self._waiting[0][0] if self._waiting else inf
            least, source = min([(source.lowest, i) for i, source in enumerate(sources)])
            bound = min(lowest, least)
            if bound == inf or four_digits(bound) > self._last[0] or not values.reached(bound, self._last[0]):
                return self.so_far
            if lowest < least:
                self._consider(*heappop(self._waiting))
            else:
                sources[source].advance()

    @property
    def so_far(self) -> list[Timed]:
        """The best so far, fastest first."""
        return [timed for _, timed in sorted(self._found.values(), key=lambda one: one[0])]

    def _take(self) -> None:
        """Put what was found since the last call into the heap."""
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

    def _consider(self, current: Seconds, serial: int, bound: Seconds, item: LayoutEstimate | Slower | Higher) -> None:
        search = self.search
        estimate = search.estimate(item)
        if estimate is None or not self.among(estimate):
            return
        if self._behind(max(current, estimate.at_least), estimate.layout):
            return
        if isinstance(item, Higher) and not self.slower_too:  # noqa: SIM102 -- one line would be too long
            if search.beaten(item, max(current, estimate.at_least)):
                return
        if (closer := search.closer(estimate, current)) > current:
            heappush(self._waiting, (closer, serial, bound, item))
            return
        now, key = search.timed(estimate), self.kind(estimate)
        if self._behind(now.time.seconds, estimate.layout):
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
            self._last = max(self._found.values(), key=lambda one: one[0])[0][0]

    def _behind(self, bound: Seconds, layout: Layout) -> bool:
        """Whether a layout that takes at least `bound` comes after the k-th: it is slower, or as fast to four digits
        and not as simple."""
        seconds = four_digits(bound)
        return seconds > self._last[0] or (seconds == self._last[0] and (seconds, effort(layout), bound) > self._last)


def four_digits(seconds: Seconds) -> Seconds:
    """Seconds rounded down to four digits: smaller differences are below the resolution of the model."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(seconds)) - 3)
    return floor(seconds / unit) * unit
