"""What pricing layouts has found: those that fit, those that need no estimate yet, and why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.errors import BadInput
from penteract.planner.space.layouts import MemoryOptions
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.memory.rank_memory import RankMemory
from penteract.units import Bytes, Seconds

TOO_LARGE = "does not fit"
SMALLER_TOO_LARGE = "a smaller micro-batch does not fit"
NEEDLESS = "a lower ZeRO stage fits too"


class Slower(NamedTuple):
    """A layout without an estimate: `twin`, the same with less recomputation, fits and is no slower."""

    twin: LayoutEstimate
    with_options: Callable[[MemoryOptions], Layout]  # of its row
    memory: MemoryOptions

    @property
    def bound(self) -> Seconds:
        """A lower bound of its step time: that of its twin, which is no slower."""
        return self.twin.at_least

    @property
    def precision(self) -> Policy:
        """The policy of its twin."""
        return self.twin.precision

    @property
    def layout(self) -> Layout:
        """The row's layout with its own `memory`."""
        return self.with_options(self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class Higher:
    """A layout without an estimate (the first of `options` that fits) whose ZeRO stage is higher than that of layouts
    which fit. It communicates more, but earlier: it is listed only if it is faster than all of `lower`.

    between  counts the options that are tried; None if they are counted already
    """

    options: tuple[Layout, ...]
    prices: Estimator
    lower: tuple[LayoutEstimate | Higher, ...]
    between: Tried | None = None

    @property
    def at_least(self) -> Seconds:
        """A lower bound by its passes; each option takes longer than the one before."""
        return self.prices.bounds.at_least(self.options[0])

    @property
    def precision(self) -> Policy:
        """The precision of its options."""
        return self.prices.policy


class Tried(Protocol):
    """Counts layouts that are tried, and those of them that fit."""

    tried: int
    fit: int


class Evaluated(NamedTuple):
    """A lower bound of a layout's bytes; if that is within the limit, its memory; if this is, too, the bound of its
    time."""

    floor: Bytes
    memory: RankMemory | None = None
    at_least: Seconds = 0.0


class Miss(NamedTuple):
    """A layout that does not fit, and a lower bound of the bytes it needs."""

    size: Bytes
    layout: Layout
    precision: Policy


def _unlimited(_: Bytes) -> bool:
    return True


@dataclass(slots=True)
class Priced:
    """The results of pricing legal layouts.

    `usable`   bytes that a layout may take; 0 if not known
    `host_holds` whether a host has room for so many bytes of each of its ranks
    `fits`     the estimates of layouts that fit
    `slower`   layouts with more recomputation than one that fits: no faster; estimated only to find leaner layouts
    `higher`   layouts with a higher ZeRO stage than one that fits: estimated only if their bound is among the best
    `refused`  how many were left out or do not fit, by reason
    `nearest`  of layouts that do not fit, that which needs least of each mesh and technique
    `offloads` of layouts that do not fit their hosts, that which offloads least
    `count`    how many were estimated; the others needed only a bound
    """

    usable: Bytes = 0
    host_holds: Callable[[Bytes], bool] = _unlimited
    fits: list[LayoutEstimate] = field(default_factory=list[LayoutEstimate])
    slower: list[Slower] = field(default_factory=list[Slower])
    higher: list[Higher] = field(default_factory=list[Higher])
    refused: Counter[str] = field(default_factory=Counter[str])
    nearest: dict[Hashable, Miss] = field(default_factory=dict[Hashable, Miss])
    offloads: LayoutEstimate | None = None
    count: int = 0

    @property
    def fit(self) -> int:
        """How many are known to fit."""
        return len(self.fits) + len(self.slower)

    def miss(self, size: Bytes, layout: Layout, precision: Policy) -> None:
        """Record a layout that needs `size` bytes, if it is the least of its mesh and technique."""
        lay = layout
        alike = (lay.dp, lay.tp, lay.pp, lay.cp, lay.ep, lay.zero, lay.recompute, lay.recompute_every, precision)
        if alike not in self.nearest or size < self.nearest[alike].size:
            self.nearest[alike] = Miss(size, layout, precision)

    def within(self, prices: Estimator, layout: Layout, floor: Bytes | None = None) -> LayoutEstimate | None:
        """The estimate of a layout that fits in `usable` bytes (0: any). If it does not fit, record it; None then.
        `floor`: a lower bound of its bytes, if it is known."""
        return self.recorded(prices, layout, self.evaluated(prices, layout, floor))

    def evaluated(
        self, prices: Estimator, layout: Layout, floor: Bytes | None = None, at_least: Seconds | None = None
    ) -> Evaluated:
        """What `recorded` needs to know of a layout. `at_least`: the lower bound of its time, if it is known."""
        size = 0 if not self.usable else prices.floor(layout) if floor is None else floor
        if size > self.usable:
            return Evaluated(size)
        memory = prices.memory_of(layout)
        if self.usable and memory.allocated > self.usable:
            return Evaluated(size, memory)
        return Evaluated(size, memory, prices.bounds.of(layout) if at_least is None else at_least)

    def recorded(self, prices: Estimator, layout: Layout, outcome: Evaluated) -> LayoutEstimate | None:
        """The estimate of a layout that fits. If it does not fit, record it; None then."""
        size, memory, at_least = outcome
        if memory is None:
            self.miss(size, layout, prices.policy)
            return None
        self.count += 1
        if self.usable and memory.allocated > self.usable:
            self.miss(memory.allocated, layout, prices.policy)
            return None
        estimate = prices.estimate(layout, memory, at_least)
        return estimate if self.on_hosts(estimate) else None

    def on_hosts(self, estimate: LayoutEstimate) -> bool:
        """Whether what a layout offloads fits its hosts. If not, record it."""
        if self.host_holds(estimate.host):
            return True
        if self.offloads is None or estimate.host < self.offloads.host:
            self.offloads = estimate
        return False


def unfit(prices: Estimator, layout: Layout) -> str:
    """Why a layout is illegal in its FP8 recipe, or ""."""
    try:
        prices.check_sizes(layout)
    except BadInput as bad:
        return bad.what
    return ""
