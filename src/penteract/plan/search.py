"""The best layouts of very many, exactly: priced, and simulated, from the lowest bound up.

What passes take bounds the time of all layouts that share them, before any is priced; a quote's `at_least` bounds its
simulated time. So once the k-th best simulated time lies below every bound that is left, no layout that is left can be
among the best k (branch and bound): it is neither priced nor simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor, inf, log10

from penteract.estimate.quote import Quote, Quoter, StepTime
from penteract.plan.effort import Effort, effort
from penteract.plan.frontier import Frontier
from penteract.plan.rows import Slower
from penteract.spec.layout import Layout
from penteract.spec.precision import Policy
from penteract.units import Seconds

Order = tuple[Seconds, Effort, Seconds]


@dataclass(frozen=True, slots=True)
class Timed:
    """A layout with its price and its simulated step."""

    quote: Quote
    time: StepTime

    @property
    def layout(self) -> Layout:
        return self.quote.layout

    @property
    def order(self) -> Order:
        """By time to four digits; among equals the simpler first."""
        return four_digits(self.time.seconds), effort(self.layout), self.time.seconds


@dataclass(slots=True)
class Search:
    """Best layouts, of those that are priced and of the frontier; a layout is simulated once however many searches ask.

    `quoters` by precision.
    """

    quoters: Mapping[Policy, Quoter]
    frontier: Frontier = field(default_factory=Frontier)
    _times: dict[tuple[Layout, Policy], Timed] = field(default_factory=dict[tuple[Layout, Policy], Timed], repr=False)
    _bounds: dict[tuple[Layout, Policy], Seconds] = field(
        default_factory=dict[tuple[Layout, Policy], Seconds], repr=False
    )

    @property
    def quotes(self) -> list[Quote]:
        """Of those that are priced and fit."""
        return self.frontier.found.fits

    @property
    def simulated(self) -> int:
        """How many layouts were."""
        return len(self._times)

    def add(self, quote: Quote) -> None:
        """One more to choose among."""
        self.quotes.append(quote)

    def find(self, layout: Layout, precision: Policy) -> Quote | None:
        """The quote of a layout that is tried and fits, if nothing simpler makes it needless."""
        self.frontier.reach(layout, precision)
        return next((q for q in self.quotes if q.layout == layout and q.precision == precision), None)

    def simplest(self, precision: Policy) -> Quote:
        """Of what fits, if anything does."""
        own = (q for q in self.quotes if q.precision == precision)
        known = min(own, key=lambda q: (effort(q.layout), q.allocated))
        return self.frontier.simplest(precision, effort(known.layout)) or known

    def timed(self, quote: Quote) -> Timed:
        key = quote.layout, quote.precision
        if key not in self._times:
            self._times[key] = Timed(quote, self.quoters[quote.precision].time(quote))
        return self._times[key]

    def best(
        self,
        k: int,
        *,
        among: Callable[[Quote], bool] = lambda _: True,
        kind: Callable[[Quote], Hashable] = lambda q: (q.layout, q.precision),
        slower_too: bool = False,
    ) -> list[Timed]:
        """The `k` fastest, one of each `kind`, fastest first. Exact: nothing is sampled."""
        found: dict[Hashable, tuple[Order, Timed]] = {}
        last: Order | None = None  # of the k-th
        for bound, item in self._ascending(slower_too):
            if last and four_digits(bound) > last[0]:
                break
            if item is None:
                continue
            quote = self.quoters[item.precision].quote(item.layout) if isinstance(item, Slower) else item
            if not among(quote) or (last and four_digits(self.bound(quote)) > last[0]):
                continue
            now, key = self.timed(quote), kind(quote)
            if last and four_digits(now.time.seconds) > last[0]:
                continue
            order = now.order
            if key not in found or order < found[key][0]:
                found[key] = order, now
                found = dict(sorted(found.items(), key=lambda one: one[1][0])[:k])
                last = max(order for order, _ in found.values()) if len(found) == k else None
        return [timed for _, timed in found.values()]

    def bound(self, quote: Quote) -> Seconds:
        """A closer one than the quote's own, where there is one to be had for more work."""
        key = quote.layout, quote.precision
        if quote.layout.zero < 2:
            return quote.at_least
        if key not in self._bounds:
            self._bounds[key] = self.quoters[quote.precision].bound(quote)
        return self._bounds[key]

    def _ascending(self, slower_too: bool) -> Iterator[tuple[Seconds, Quote | Slower | None]]:
        """Ascending bounds, with what they bound. None: what is not priced yet, and is if the caller goes on."""
        serial, heap = count(), list[tuple[Seconds, int, Quote | Slower]]()

        def put(quotes: Iterable[Quote], slower: Iterable[Slower]) -> None:
            for quote in quotes:
                heappush(heap, (quote.at_least, next(serial), quote))
            for other in slower if slower_too else ():
                heappush(heap, (other.bound, next(serial), other))

        put(self.quotes, self.frontier.found.slower)
        while heap or self.frontier.lowest < inf:
            if heap and heap[0][0] < self.frontier.lowest:
                bound, _, item = heappop(heap)
                yield bound, item
            else:
                yield self.frontier.lowest, None
                put(*self.frontier.advance())


def four_digits(seconds: Seconds) -> Seconds:
    """Rounded down: an order on these is one on seconds, and differences below what a model resolves are none."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(seconds)) - 3)
    return floor(seconds / unit) * unit
