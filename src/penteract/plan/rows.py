"""Layouts that differ in memory alone, priced together: most are known to be too large, or needless, without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from penteract.errors import BadInput
from penteract.estimate.quote import Quote, Quoter
from penteract.plan.space import Family, Memory
from penteract.schedule.registry import schedule_of
from penteract.spec.layout import Layout
from penteract.spec.precision import Policy
from penteract.spec.recompute import NONE
from penteract.units import Bytes, Seconds

TOO_LARGE = "does not fit"
SMALLER_TOO_LARGE = "a smaller micro-batch does not fit"
NEEDLESS = "it fits with less of its state cut"


def plain(remake: tuple[str, ...]) -> tuple[str, ...]:
    """The least that is never slower than to remake these words: `NONE` where they are more than it, or else they."""
    return NONE if "*" in remake or {*NONE} <= {*remake} else remake


class Slower(NamedTuple):
    """A layout left without a price: `twin`, the same with less recomputed, fits and is no slower."""

    twin: Quote
    row: Row
    memory: Memory

    @property
    def bound(self) -> Seconds:
        return self.twin.at_least

    @property
    def precision(self) -> Policy:
        return self.twin.precision

    @property
    def layout(self) -> Layout:
        return self.row.layout(self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class Higher:
    """A layout left without a price that has a higher stage of ZeRO than others which fit: the first of `options` that
    fits. It puts more on wires, yet earlier: where it is faster than all of `lower`, it is none too many.

    between  where options are counted once they are tried; else they are counted already
    """

    options: tuple[Layout, ...]
    prices: Quoter
    lower: tuple[Quote | Higher, ...]
    between: Tried | None = None

    @property
    def at_least(self) -> Seconds:
        """By its passes; options take longer one after the other."""
        return self.prices.bounds.at_least(self.options[0])

    @property
    def precision(self) -> Policy:
        return self.prices.policy


class Tried(Protocol):
    """Counts layouts that are tried."""

    tried: int
    fit: int


class Miss(NamedTuple):
    """A layout beyond memory: bytes that it needs at least."""

    size: Bytes
    layout: Layout
    precision: Policy


@dataclass(slots=True)
class Priced:
    """What pricing legal layouts gives.

    `fits`     the quotes within memory
    `slower`   layouts with more recomputation than what fits: no faster, and priced when less memory is asked for
    `higher`   layouts with a higher stage of ZeRO than what fits: priced where their bound is among the best
    `refused`  how many are not looked at, or do not fit, by reason
    `nearest`  of those beyond memory, the least of each mesh and technique, with the bytes that it needs at least
    `count`    how many were priced: the others needed a bound alone
    """

    usable: Bytes = 0
    fits: list[Quote] = field(default_factory=list[Quote])
    slower: list[Slower] = field(default_factory=list[Slower])
    higher: list[Higher] = field(default_factory=list[Higher])
    refused: Counter[str] = field(default_factory=Counter[str])
    nearest: dict[Hashable, Miss] = field(default_factory=dict[Hashable, Miss])
    count: int = 0

    @property
    def fit(self) -> int:
        """How many are known to be within memory."""
        return len(self.fits) + len(self.slower)

    def miss(self, size: Bytes, layout: Layout, precision: Policy) -> None:
        lay = layout
        alike = (lay.dp, lay.tp, lay.pp, lay.cp, lay.ep, lay.zero, lay.remake, lay.remake_every, precision)
        if alike not in self.nearest or size < self.nearest[alike].size:
            self.nearest[alike] = Miss(size, layout, precision)

    def within(self, prices: Quoter, layout: Layout) -> Quote | None:
        """The quote of a layout that fits in `usable` bytes (0: any); None, and it is noted, where it does not."""
        size = prices.floor(layout) if self.usable else 0
        if size <= self.usable:
            self.count += 1
            quote = prices.quote(layout)
            if not self.usable or quote.allocated <= self.usable:
                return quote
            size = quote.allocated
        self.miss(size, layout, prices.policy)
        return None


@dataclass(frozen=True, slots=True)
class Branch:
    """A family with the prices of one precision, and by memory the smallest micro-batch known to be too large."""

    family: Family
    prices: Quoter
    too_large: dict[Memory, int] = field(default_factory=dict[Memory, int])

    @property
    def comparable(self) -> bool:
        """Whether recomputing takes no less: it does where what is made again need not come back from the host."""
        return not self.family.rest.get("offload")

    @property
    def spares(self) -> bool:
        """Whether recomputing keeps no more, either: what waits for its gradient may be more than what it spares."""
        return self.comparable and not schedule_of(self.family.rest["schedule"]).split_backward

    def rows(self) -> Iterator[Row]:
        """One for each size of the micro-batch."""
        members: dict[tuple[int, int], list[Memory]] = {}
        for memory, sizes in self.family.members:
            for pair in sizes:
                members.setdefault(pair, []).append(memory)
        for (size, steps), memories in members.items():
            yield Row(self, size, steps, tuple(memories))


@dataclass(frozen=True, slots=True)
class Row:
    """Layouts of a branch with one size of the micro-batch: they differ in `Memory` alone."""

    branch: Branch
    size: int
    steps: int
    memories: tuple[Memory, ...]

    def layout(self, memory: Memory) -> Layout:
        return self.branch.family.layout(memory, self.size, self.steps)

    def bound(self) -> Seconds:
        """What each takes at least."""
        return min(map(self.branch.prices.bounds.at_least, self._quickest()))

    def rough_bound(self, largest: int) -> Seconds:
        """The same, lower, from a look at the largest micro-batch that any row has."""
        return min([self.branch.prices.bounds.roughly(lay, largest) for lay in self._quickest()])

    def _quickest(self) -> list[Layout]:
        """One of those with the same passes; what remakes more than another of them takes no less."""
        apart = {(m.remake, m.attention, m.loss, m.loss_chunk, m.elementwise): m for m in self.memories}
        some = {m.remake for m in self.memories} if self.branch.comparable else set[tuple[str, ...]]()
        return [self.layout(m) for m in apart.values() if plain(m.remake) == m.remake or plain(m.remake) not in some]

    def price(self, found: Priced) -> None:
        """Put the layouts into `found`: those that fit, and those that need not be looked at as others do.

        A micro-batch larger than one that does not fit keeps at least as much, and is not asked. Recomputing keeps
        no more and takes no less than not recomputing, but where `Branch.spares` says otherwise. A higher stage of
        ZeRO than one that fits is seldom faster: it waits, and is counted as needless until it is among the best.
        """
        fits, slower, higher = dict[Memory, Quote](), list[Slower](), dict[Memory, Higher]()
        prices, too_large = self.branch.prices, self.branch.too_large
        spares = self.branch.spares
        for memory in self.memories:
            lower = [fits[m] for m in _lower(memory, spares=spares) if m in fits]
            if twin := fits.get(memory._replace(remake=plain(memory.remake))) if spares else None:
                slower.append(Slower(twin, self, memory))
            elif lower:
                also = [higher[m] for m in _lower(memory, spares=spares) if m in higher]
                higher[memory] = Higher((self.layout(memory),), prices, (*lower, *also))
                found.refused[NEEDLESS] += 1
            elif self.size > too_large.get(memory, self.size):
                found.refused[SMALLER_TOO_LARGE] += 1
            elif why := unfit(prices, layout := self.layout(memory)):
                found.refused[why] += 1
            elif quote := found.within(prices, layout):
                fits[memory] = quote
            else:
                found.refused[TOO_LARGE] += 1
                too_large[memory] = self.size
        found.fits.extend(fits.values())
        found.slower.extend(slower)
        found.higher.extend(higher.values())


def unfit(prices: Quoter, layout: Layout) -> str:
    """Why a layout cannot be in its recipe of FP8; nothing where it can."""
    try:
        prices.check_sizes(layout)
    except BadInput as bad:
        return bad.what
    return ""


Sharing = tuple[int, bool, bool]  # zero, whole_gradients, keep_gathered


def lower_stages(zero: int, whole_gradients: bool, keep_gathered: bool) -> tuple[Sharing, ...]:
    """What puts less on wires beside each micro-batch, and so seldom takes longer."""
    if zero < 2:
        return ()
    one = (1, False, False)
    return (one,) if zero == 2 or whole_gradients or keep_gathered else (
        one, (2, False, False), (3, True, False), (3, False, True)
    )  # fmt: skip


@cache
def _lower(memory: Memory, *, spares: bool) -> list[Memory]:
    """The same with a lower stage, and no more recomputation."""
    stages = lower_stages(memory.zero, memory.whole_gradients, memory.keep_gathered)
    found = [memory._replace(zero=z, whole_gradients=w, keep_gathered=k) for z, w, k in stages]
    if spares and (remake := plain(memory.remake)) != memory.remake:
        found += [m._replace(remake=remake) for m in found]
    return found
