"""Layouts that differ in memory alone, priced together: most are known to be too large, or needless, without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress
from operator import not_
from typing import NamedTuple, Protocol

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.config.recompute import NONE
from penteract.errors import BadInput
from penteract.planner.space.layouts import LayoutFamily, MemoryOptions
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.memory import Least
from penteract.readings.memory_bound import Growths
from penteract.schedule.registry import schedule_of
from penteract.units import Bytes, Seconds

TOO_LARGE = "does not fit"
SMALLER_TOO_LARGE = "a smaller micro-batch does not fit"
NEEDLESS = "it fits with less of its state cut"


def plain(recompute: tuple[str, ...]) -> tuple[str, ...]:
    """The least that is never slower than to recompute these ops: `NONE` where they are more than it, or else
    they."""
    return NONE if "*" in recompute or {*NONE} <= {*recompute} else recompute


class Slower(NamedTuple):
    """A layout left without a price: `twin`, the same with less recomputed, fits and is no slower."""

    twin: LayoutEstimate
    row: Row
    memory: MemoryOptions

    @property
    def bound(self) -> Seconds:
        """Seconds that its step takes at least: the bound of its twin, which is no slower."""
        return self.twin.at_least

    @property
    def precision(self) -> Policy:
        """The policy of its twin."""
        return self.twin.precision

    @property
    def layout(self) -> Layout:
        """The row's layout with its own `memory`."""
        return self.row.layout(self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class Higher:
    """A layout left without a price that has a higher stage of ZeRO than others which fit: the first of `options` that
    fits. It puts more on wires, yet earlier: where it is faster than all of `lower`, it is none too many.

    between  where options are counted once they are tried; else they are counted already
    """

    options: tuple[Layout, ...]
    prices: Estimator
    lower: tuple[LayoutEstimate | Higher, ...]
    between: Tried | None = None

    @property
    def at_least(self) -> Seconds:
        """By its passes; options take longer one after the other."""
        return self.prices.bounds.at_least(self.options[0])

    @property
    def precision(self) -> Policy:
        """The policy in which its options are priced."""
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

    `fits`     the estimates within memory
    `slower`   layouts with more recomputation than what fits: no faster, and priced when less memory is asked for
    `higher`   layouts with a higher stage of ZeRO than what fits: priced where their bound is among the best
    `refused`  how many are not looked at, or do not fit, by reason
    `nearest`  of those beyond memory, the least of each mesh and technique, with the bytes that it needs at least
    `count`    how many were priced: the others needed a bound alone
    """

    usable: Bytes = 0
    fits: list[LayoutEstimate] = field(default_factory=list[LayoutEstimate])
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
        """Note a layout that needs `size` bytes; of those with the same mesh and technique the least is kept."""
        lay = layout
        alike = (lay.dp, lay.tp, lay.pp, lay.cp, lay.ep, lay.zero, lay.recompute, lay.recompute_every, precision)
        if alike not in self.nearest or size < self.nearest[alike].size:
            self.nearest[alike] = Miss(size, layout, precision)

    def within(self, prices: Estimator, layout: Layout) -> LayoutEstimate | None:
        """The estimate of a layout that fits in `usable` bytes (0: any); None, and it is noted, where it does not."""
        size = prices.floor(layout) if self.usable else 0
        if size <= self.usable:
            return self.priced(prices, layout)
        self.miss(size, layout, prices.policy)
        return None

    def priced(self, prices: Estimator, layout: Layout) -> LayoutEstimate | None:
        """The same of a layout whose lower bound fits."""
        self.count += 1
        estimate = prices.estimate(layout)
        if not self.usable or estimate.allocated <= self.usable:
            return estimate
        self.miss(estimate.allocated, layout, prices.policy)
        return None


@dataclass(frozen=True, slots=True)
class Branch:
    """A family with the prices of one precision, and by memory the smallest micro-batch known to be too large."""

    family: LayoutFamily
    prices: Estimator
    too_large: dict[MemoryOptions, int] = field(default_factory=dict[MemoryOptions, int])
    known: dict[MemoryOptions, Least] = field(default_factory=dict[MemoryOptions, Least])

    def least(self, memory: MemoryOptions) -> Least:
        """What each of these layouts holds at least, whatever the size of its micro-batch."""
        if memory not in self.known:
            self.known[memory] = self.prices.least(self.family.layout(memory, 1, 1))
        return self.known[memory]

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
        members: dict[tuple[int, int], list[MemoryOptions]] = {}
        for memory, sizes in self.family.members:
            for pair in sizes:
                members.setdefault(pair, []).append(memory)
        for (size, steps), memories in members.items():
            some = {m.recompute for m in memories} if self.comparable else set[tuple[str, ...]]()
            more = [plain(m.recompute) != m.recompute and plain(m.recompute) in some for m in memories]
            yield Row(self, size, steps, tuple(compress(memories, map(not_, more))), tuple(compress(memories, more)))


@dataclass(frozen=True, slots=True)
class Row:
    """Layouts of a branch with one size of the micro-batch: they differ in `MemoryOptions` alone.

    `more`: those that recompute more than another of them and so take no less. They wait until the others are priced,
    and are a `second` row then.
    """

    branch: Branch
    size: int
    steps: int
    memories: tuple[MemoryOptions, ...]
    more: tuple[MemoryOptions, ...] = ()
    fits: dict[MemoryOptions, LayoutEstimate] = field(default_factory=dict[MemoryOptions, LayoutEstimate])
    higher: dict[MemoryOptions, Higher] = field(default_factory=dict[MemoryOptions, Higher])
    second: bool = False

    def __len__(self) -> int:
        """How many layouts it has, with those that wait."""
        return len(self.memories) + len(self.more)

    def layout(self, memory: MemoryOptions) -> Layout:
        """The row's layout with these memory options."""
        return self.branch.family.layout(memory, self.size, self.steps)

    def bound(self) -> Seconds:
        """What each takes at least."""
        return min(map(self.branch.prices.bounds.at_least, self._quickest()))

    def rough_bound(self, largest: int) -> Seconds:
        """The same, lower, from a look at the largest micro-batch that any row has."""
        return min([self.branch.prices.bounds.roughly(lay, largest) for lay in self._quickest()])

    def _quickest(self) -> list[Layout]:
        """One of those with the same passes."""
        apart = {(m.recompute, m.attention, m.loss, m.loss_chunk, m.elementwise, m.fuse): m for m in self.memories}
        return [self.layout(m) for m in apart.values()]

    def price(self, found: Priced) -> Row | None:
        """Put the layouts into `found`: those that fit, and those that need not be looked at as others do. What is left
        is a row of its own.

        A micro-batch larger than one that does not fit keeps at least as much, and is not asked. Recomputing keeps
        no more and takes no less than not recomputing, but where `Branch.spares` says otherwise. A higher stage of
        ZeRO than one that fits is seldom faster: it waits, and is counted as needless until it is among the best.
        """
        fits, higher, spares = self.fits, self.higher, self.branch.spares
        prices, too_large, floor = self.branch.prices, self.branch.too_large, self._floor()
        for memory in self.memories:
            lower = [fits[m] for m in _lower(memory, spares=spares) if m in fits]
            if lower:
                also = [higher[m] for m in _lower(memory, spares=spares) if m in higher]
                found.higher.append(Higher((self.layout(memory),), prices, (*lower, *also)))
                higher[memory] = found.higher[-1]
                found.refused[NEEDLESS] += 1
            elif self.size > too_large.get(memory, self.size):
                found.refused[SMALLER_TOO_LARGE] += 1
            elif prices.policy.fp8 and (why := unfit(prices, self.layout(memory))):
                found.refused[why] += 1
            elif estimate := self._within(found, memory, floor(memory) if found.usable else 0):
                fits[memory] = estimate
                found.fits.append(estimate)
            else:
                found.refused[TOO_LARGE] += 1
                too_large[memory] = self.size
        left = list[MemoryOptions]()
        for memory in self.more:
            twin = fits.get(memory._replace(recompute=plain(memory.recompute))) if spares else None
            if twin:
                found.slower.append(Slower(twin, self, memory))
            else:
                left.append(memory)
        return replace(self, memories=tuple(left), more=(), second=True) if left else None

    def _within(self, found: Priced, memory: MemoryOptions, least: Bytes) -> LayoutEstimate | None:
        """As `Priced.within`; what comes nearest is of interest only as long as nothing fits."""
        if least <= found.usable:
            return found.priced(self.branch.prices, self.layout(memory))
        if not found.fits:
            found.miss(least, self.layout(memory), self.branch.prices.policy)
        return None

    def may_fit(self, usable: Bytes) -> list[Layout]:
        """Those whose lower bound of memory is within `usable` bytes, as far as smaller micro-batches tell."""
        known, floor = self.branch.too_large, self._floor()
        some = [m for m in self.memories if self.size <= known.get(m, self.size) and floor(m) <= usable]
        return [lay for lay in map(self.layout, some) if not unfit(self.branch.prices, lay)]

    def _floor(self) -> Callable[[MemoryOptions], Bytes]:
        """Bytes that each of these layouts needs at least."""
        branch, kept, one = self.branch, dict[Growths, list[Bytes]](), self.layout(self.memories[0])

        def floor(memory: MemoryOptions) -> Bytes:
            least = branch.least(memory)
            if least.growth not in kept:
                kept[least.growth] = branch.prices.kept(one, least.growth)
            return least.total(kept[least.growth], self.size)

        return floor


def unfit(prices: Estimator, layout: Layout) -> str:
    """Why a layout cannot be in its recipe of FP8; nothing where it can."""
    try:
        prices.check_sizes(layout)
    except BadInput as bad:
        return bad.what
    return ""


Sharing = tuple[int, bool, bool]  # zero, reduce_scatter_once, reshard_after_step


def lower_stages(zero: int, reduce_scatter_once: bool, reshard_after_step: bool) -> tuple[Sharing, ...]:
    """What puts less on wires beside each micro-batch, and so seldom takes longer."""
    if zero < 2:
        return ()
    one = (1, False, False)
    return (one,) if zero == 2 or reduce_scatter_once or reshard_after_step else (
        one, (2, False, False), (3, True, False), (3, False, True)
    )  # fmt: skip


@cache
def _lower(memory: MemoryOptions, *, spares: bool) -> list[MemoryOptions]:
    """The same with a lower stage, and no more recomputation."""
    stages = lower_stages(memory.zero, memory.reduce_scatter_once, memory.reshard_after_step)
    found = [memory._replace(zero=z, reduce_scatter_once=w, reshard_after_step=k) for z, w, k in stages]
    if spares and (recompute := plain(memory.recompute)) != memory.recompute:
        found += [m._replace(recompute=recompute) for m in found]
    return found
