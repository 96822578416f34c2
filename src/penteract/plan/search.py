"""The best layouts of very many, exactly: all are priced, and simulated from the lowest bound up.

A quote's `at_least` bounds its simulated time from below. So once the k-th best simulated time lies below every bound
that is left, no layout that is left can be among the best k (branch and bound, with the bounds sorted).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from math import floor, log10
from typing import NamedTuple

from penteract.errors import BadInput
from penteract.estimate.quote import Quote, Quoter, StepTime
from penteract.plan.ask import RECOMPUTE
from penteract.plan.space import Family, Memory
from penteract.spec.layout import SCHEDULES, Layout
from penteract.spec.precision import Policy
from penteract.units import Bytes, Seconds

TOO_LARGE = "does not fit"
SMALLER_TOO_LARGE = "a smaller micro-batch does not fit"
NEEDLESS = "a lower stage of ZeRO fits"

PLAIN = RECOMPUTE["none"]
_PLAINEST_FIRST = ("1f1b", "afab", "interleaved", "zb_h1")


def effort(layout: Layout) -> tuple[int, ...]:
    """How much a layout is beyond plain data parallelism: techniques in use, then how far each goes."""
    lay = layout
    degrees = (lay.tp, lay.pp, lay.cp, lay.ep)
    remade = lay.remake != PLAIN or lay.remake_else != PLAIN
    extras = (lay.zero > 0, remade, lay.expert_tp > 1, lay.schedule != _PLAINEST_FIRST[0], lay.shard_group > 0,
              lay.whole_gradients, lay.keep_gathered, bool(lay.offload))  # fmt: skip
    used = sum(n > 1 for n in degrees) + sum(extras)
    rank = (*_PLAINEST_FIRST, *SCHEDULES).index(lay.schedule)
    return (used, lay.tp * lay.pp * lay.cp, rank, lay.vpp, lay.cp, lay.tp, lay.ep, lay.zero, remade, lay.expert_tp,
            lay.context_method != Layout().context_method, lay.micro_batch_size)  # fmt: skip


Order = tuple[Seconds, tuple[int, ...], Seconds]


class Slower(NamedTuple):
    """A layout that is not priced, as `twin`, with less beside it, fits and is no slower."""

    twin: Quote
    family: Family
    memory: Memory
    size: int
    steps: int

    @property
    def bound(self) -> Seconds:
        return self.twin.at_least

    @property
    def precision(self) -> Policy:
        return self.twin.precision

    @property
    def layout(self) -> Layout:
        return self.family.layout(self.memory, self.size, self.steps)


@dataclass(slots=True)
class Priced:
    """What pricing the legal layouts gives.

    `fits`     the quotes within memory
    `slower`   layouts with more recomputation or a higher stage of ZeRO than what fits: no faster, and priced when less
               memory is asked for
    `needless` of these, how many have a higher stage than they need: not asked whether they fit
    `nearest`  of those beyond memory, the least of each mesh and technique, with the bytes that it needs at least
    `count`    how many were priced: the others needed a bound alone
    """

    fits: list[Quote] = field(default_factory=list[Quote])
    slower: list[Slower] = field(default_factory=list[Slower])
    needless: int = 0
    nearest: dict[Hashable, Miss] = field(default_factory=dict[Hashable, "Miss"])
    count: int = 0

    def miss(self, size: Bytes, layout: Layout, precision: Policy) -> None:
        lay = layout
        alike = (lay.dp, lay.tp, lay.pp, lay.cp, lay.ep, lay.zero, lay.remake, lay.remake_every, precision)
        if alike not in self.nearest or size < self.nearest[alike].size:
            self.nearest[alike] = Miss(size, layout, precision)


class Miss(NamedTuple):
    """A layout beyond memory: bytes that it needs at least."""

    size: Bytes
    layout: Layout
    precision: Policy


def price_all(
    families: Iterable[Family], prices: Quoter, usable: Bytes, refused: Counter[str], found: Priced, precision: Policy
) -> None:
    """Quote the layouts of `families`, and put those within `usable` bytes (0: all of them) into `found`.

    Four comparisons spare a price. What is beyond memory by a bound from below does not fit. A micro-batch larger than
    one that does not fit keeps at least as much: it is counted in `refused`, as is what does not fit. Recomputing keeps
    no more and takes no less than not recomputing. And a stage of ZeRO takes no less than the lower ones from 1 on:
    where one of those fits, it is counted as needless.
    """
    for family in families:
        fits: dict[tuple[Memory, int], Quote] = {}  # of this family
        spares = family.rest["schedule"] != "zb_h1"  # there, what waits may be more than what recomputing spares
        for memory, sizes in family.members:
            lower = _lower(memory, spares=spares)
            plain = memory._replace(remake=PLAIN) if spares and memory.remake != PLAIN else None
            for place, (size, steps) in enumerate(sizes):
                enough = next((fits[m, size] for m in lower if (m, size) in fits), None)
                twin = enough or (fits.get((plain, size)) if plain else None)
                if twin:
                    found.slower.append(Slower(twin, family, memory, size, steps))
                    if enough:
                        refused[NEEDLESS] += 1
                        found.needless += 1
                    continue
                layout = family.layout(memory, size, steps)
                if precision.fp8 and (why := unfit(prices, layout)):
                    refused[why] += 1
                    continue
                quote = within(prices, layout, usable, found, precision)
                if quote is None:
                    refused[TOO_LARGE] += 1
                    if rest := len(sizes) - place - 1:
                        refused[SMALLER_TOO_LARGE] += rest
                    break
                fits[memory, size] = quote
        found.fits.extend(fits.values())


def unfit(prices: Quoter, layout: Layout) -> str:
    """Why a layout cannot be in its recipe of FP8; nothing where it can."""
    try:
        prices.check_sizes(layout)
    except BadInput as bad:
        return bad.what
    return ""


def within(prices: Quoter, layout: Layout, usable: Bytes, found: Priced, precision: Policy) -> Quote | None:
    """The quote of a layout that fits; None, and it is noted, where it does not."""
    size = prices.floor(layout) if usable else 0
    if size <= usable:
        found.count += 1
        quote = prices.quote(layout)
        if not usable or quote.allocated <= usable:
            return quote
        size = quote.allocated
    found.miss(size, layout, precision)
    return None


Sharing = tuple[int, bool, bool]  # zero, whole_gradients, keep_gathered


def lower_stages(zero: int, whole_gradients: bool, keep_gathered: bool) -> tuple[Sharing, ...]:
    """What takes no longer, as it puts less on wires beside each micro-batch."""
    if zero < 2:
        return ()
    one = (1, False, False)
    return (one,) if zero == 2 or whole_gradients or keep_gathered else (
        one, (2, False, False), (3, True, False), (3, False, True)
    )  # fmt: skip


def _lower(memory: Memory, *, spares: bool) -> list[Memory]:
    """The same with a lower stage, and no more recomputation."""
    stages = lower_stages(memory.zero, memory.whole_gradients, memory.keep_gathered)
    found = [memory._replace(zero=z, whole_gradients=w, keep_gathered=k) for z, w, k in stages]
    if spares and memory.remake != PLAIN:
        found += [m._replace(remake=PLAIN) for m in found]
    return found


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
    """Best layouts among `quotes`; a layout is simulated once however many searches ask for it.

    `slower` are looked at only where `best` is asked to. `quoters` by precision.
    """

    quoters: Mapping[Policy, Quoter]
    quotes: list[Quote]
    slower: list[Slower] = field(default_factory=list[Slower])
    _times: dict[tuple[Layout, Policy], Timed] = field(default_factory=dict[tuple[Layout, Policy], Timed], repr=False)
    _bounds: dict[tuple[Layout, Policy], Seconds] = field(
        default_factory=dict[tuple[Layout, Policy], Seconds], repr=False
    )

    def __post_init__(self) -> None:
        self.quotes = sorted(self.quotes, key=lambda q: q.at_least)
        self.slower = sorted(self.slower, key=lambda s: s.bound)

    @property
    def simulated(self) -> int:
        """How many layouts were."""
        return len(self._times)

    def add(self, quote: Quote) -> None:
        """One more to choose among."""
        insort(self.quotes, quote, key=lambda q: q.at_least)

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
        for bound, item in self._bounded(slower_too):
            if last and four_digits(bound) > last[0]:
                break
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

    def _bounded(self, slower_too: bool) -> Iterator[tuple[Seconds, Quote | Slower]]:
        """Ascending bounds, with what they bound."""
        priced = ((q.at_least, q) for q in self.quotes)
        slower = ((s.bound, s) for s in self.slower)
        return merge(priced, slower, key=lambda b: b[0]) if slower_too else priced


def four_digits(seconds: Seconds) -> Seconds:
    """Rounded down: an order on these is one on seconds, and differences below what a model resolves are none."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(seconds)) - 3)
    return floor(seconds / unit) * unit
