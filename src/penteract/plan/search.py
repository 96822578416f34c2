"""The best layouts of very many, exactly: all are priced, and simulated from the lowest bound up.

A quote's `at_least` bounds its simulated time from below. So once the k-th best simulated time lies below every bound
that is left, no layout that is left can be among the best k (branch and bound, with the bounds sorted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import merge
from math import floor, log10

from penteract.estimate.quote import Quote, Quoter, StepTime
from penteract.plan.ask import RECOMPUTE, recompute_of
from penteract.plan.space import Family
from penteract.spec.layout import SCHEDULES, Layout
from penteract.units import Bytes, Seconds

TOO_LARGE = "does not fit"
SMALLER_TOO_LARGE = "a smaller micro-batch does not fit"

_PLAIN = RECOMPUTE["none"]
_PLAINEST_FIRST = ("1f1b", "afab", "interleaved", "zb_h1")


def effort(layout: Layout) -> tuple[int, ...]:
    """How much a layout is beyond plain data parallelism: techniques in use, then how far each goes."""
    lay = layout
    degrees = (lay.tp, lay.pp, lay.cp, lay.ep)
    extras = (lay.zero > 0, recompute_of(lay) != "none", lay.expert_tp > 1, lay.schedule != _PLAINEST_FIRST[0])
    used = sum(n > 1 for n in degrees) + sum(extras)
    rank = (*_PLAINEST_FIRST, *SCHEDULES).index(lay.schedule)
    return (used, lay.tp * lay.pp * lay.cp, rank, lay.vpp, lay.cp, lay.tp, lay.ep, lay.zero, extras[1], lay.expert_tp,
            lay.context_method != Layout().context_method, lay.micro_batch_size)  # fmt: skip


Order = tuple[Seconds, tuple[int, ...], Seconds]
Slower = tuple[Seconds, Layout]  # a bound of its time, and a layout that is not priced


@dataclass(frozen=True, slots=True)
class Priced:
    """What pricing the legal layouts gives.

    `fits`     the quotes within memory
    `slower`   layouts that recompute what fits without: they fit, are no faster, and are priced when less memory is
               asked for
    `misses`   of those beyond memory, the least of each mesh and technique: enough to say what came near
    `count`    how many were priced
    """

    fits: list[Quote]
    slower: list[Slower]
    misses: list[Quote]
    count: int


def price_all(
    families: Iterable[Family], quote: Callable[[Layout], Quote], usable: Bytes, refused: Counter[str]
) -> Priced:
    """Quote the layouts of `families` (alike but for a micro-batch that grows), and keep those within `usable` bytes.

    Two comparisons spare a price. A micro-batch larger than one that does not fit keeps at least as much: it is counted
    in `refused`, as is what does not fit. And recomputing keeps no more and takes no less than not recomputing.
    `usable` 0: every layout fits.
    """
    fits: dict[Layout, Quote] = {}
    slower: list[Slower] = []
    misses: dict[Hashable, Quote] = {}
    count = 0
    for family in families:
        for place, layout in enumerate(family):
            # Not under zero-bubble: what waits for its weight gradients may be more than what recomputing spares.
            spares = layout.remake != _PLAIN and layout.schedule != "zb_h1"
            twin = fits.get(replace(layout, remake=_PLAIN)) if spares else None
            if twin:
                slower.append((twin.at_least, layout))
                continue
            priced = quote(layout)
            count += 1
            if usable and priced.allocated > usable:
                refused[TOO_LARGE] += 1
                if rest := len(family) - place - 1:
                    refused[SMALLER_TOO_LARGE] += rest
                alike = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.remake)
                if alike not in misses or priced.allocated < misses[alike].allocated:
                    misses[alike] = priced
                break
            fits[layout] = priced
    return Priced(list(fits.values()), slower, sorted(misses.values(), key=lambda q: q.allocated), count)


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
        return _four_digits(self.time.seconds), effort(self.layout), self.time.seconds


@dataclass(slots=True)
class Search:
    """Best layouts among `quotes`; a layout is simulated once however many searches ask for it.

    `slower` are looked at only where `best` is asked to.
    """

    quoter: Quoter
    quotes: list[Quote]
    slower: list[Slower] = field(default_factory=list[Slower])
    _times: dict[Layout, Timed] = field(default_factory=dict[Layout, Timed], repr=False)

    def __post_init__(self) -> None:
        self.quotes = sorted(self.quotes, key=lambda q: q.at_least)
        self.slower = sorted(self.slower, key=lambda s: s[0])

    @property
    def simulated(self) -> int:
        """How many layouts were."""
        return len(self._times)

    def timed(self, quote: Quote) -> Timed:
        if quote.layout not in self._times:
            self._times[quote.layout] = Timed(quote, self.quoter.time(quote))
        return self._times[quote.layout]

    def best(
        self,
        k: int,
        *,
        among: Callable[[Quote], bool] = lambda _: True,
        kind: Callable[[Layout], Hashable] = lambda lay: lay,
        slower_too: bool = False,
    ) -> list[Timed]:
        """The `k` fastest, one of each `kind`, fastest first. Exact: nothing is sampled."""
        found: dict[Hashable, tuple[Order, Timed]] = {}
        last: Order | None = None  # of the k-th
        for bound, item in self._bounded(slower_too):
            if last and _four_digits(bound) > last[0]:
                break
            quote = self.quoter.quote(item) if isinstance(item, Layout) else item
            if not among(quote):
                continue
            now, key = self.timed(quote), kind(quote.layout)
            if last and _four_digits(now.time.seconds) > last[0]:
                continue
            order = now.order
            if key not in found or order < found[key][0]:
                found[key] = order, now
                found = dict(sorted(found.items(), key=lambda one: one[1][0])[:k])
                last = max(order for order, _ in found.values()) if len(found) == k else None
        return [timed for _, timed in found.values()]

    def _bounded(self, slower_too: bool) -> Iterator[tuple[Seconds, Quote | Layout]]:
        """Ascending bounds, with what they bound."""
        priced = ((q.at_least, q) for q in self.quotes)
        return merge(priced, self.slower, key=lambda b: b[0]) if slower_too else priced


def _four_digits(seconds: Seconds) -> Seconds:
    """Rounded down: an order on these is one on seconds, and differences below what a model resolves are none."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(seconds)) - 3)
    return floor(seconds / unit) * unit
