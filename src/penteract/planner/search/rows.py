"""Rows: layouts that differ only in memory options. Most of a row are refused or put aside without an estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress
from operator import not_
from typing import Any

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.config.recompute import NONE
from penteract.planner.search.priced import (
    NEEDLESS,
    SMALLER_TOO_LARGE,
    TOO_LARGE,
    Evaluated,
    Higher,
    Priced,
    Slower,
    unfit,
)
from penteract.planner.search.shared_values import ComputedHere, Key, T, Values, value
from penteract.planner.space.layout_families import LayoutFamily, MemoryOptions
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.memory.memory_bound import Growths
from penteract.readings.memory.rank_memory import Least, most
from penteract.readings.time.lower_bounds.passes import Passes
from penteract.readings.time.lower_bounds.simpler import SimplerMesh, simpler_meshes
from penteract.schedule.registry import schedule_of
from penteract.units import Bytes, Seconds


def plain(recompute: tuple[str, ...]) -> tuple[str, ...]:
    """The least recomputation that is never slower than these ops: `NONE` if they include it, else the ops."""
    return NONE if "*" in recompute or {*NONE} <= {*recompute} else recompute


_HERE = ComputedHere()
_RECOMPUTE = MemoryOptions._fields.index("recompute")
_Split = tuple[tuple[MemoryOptions, ...], tuple[MemoryOptions, ...], tuple[MemoryOptions, ...]]


@dataclass(slots=True, eq=False)
class Branch:
    """A family of layouts with the estimator of one precision. `too_large`: the smallest micro-batch size that does not
    fit, by memory options; `lower_bounds`, `resident` and `quick`: caches of `least`, of its bytes between steps and of
    `quickest`; `smallest`: those with the smallest micro-batch, one of each that have equal passes.
    `serial`, `values` and `share`: its number, where its values come from, and whose they are."""

    family: LayoutFamily
    prices: Estimator
    serial: int = 0
    values: Values = _HERE
    share: int = 0
    too_large: dict[MemoryOptions, int] = field(default_factory=lambda: {})
    lower_bounds: dict[MemoryOptions, Least] = field(default_factory=lambda: {})
    resident: dict[tuple[object, ...], tuple[Bytes, ...]] = field(default_factory=lambda: {})
    smallest: list[Layout] = field(default_factory=lambda: [])
    quick: dict[MemoryOptions, Sequence[Passes]] = field(default_factory=lambda: {})

    def least(self, memory: MemoryOptions) -> Least:
        """A lower bound of memory, as a function of the micro-batch size."""
        if (found := self.lower_bounds.get(memory)) is None:
            layout = self.family.layout(memory, 1, 1)
            found = self.lower_bounds[memory] = Least(self.resident_bytes(memory, layout), self.prices.growth(layout))
        return found

    def resident_bytes(self, memory: MemoryOptions, layout: Layout) -> tuple[Bytes, ...]:
        """Bytes between steps: the same with any recomputation."""
        key = memory[:_RECOMPUTE] + memory[_RECOMPUTE + 1 :]
        if (found := self.resident.get(key)) is None:
            found = self.resident[key] = self.prices.resident(layout)
        return found

    @property
    def comparable(self) -> bool:
        """Whether recomputation is never faster. With offload it may be: a recomputed value need not come back from the
        host."""
        return not self.family.rest.get("offload")

    @property
    def spares(self) -> bool:
        """Whether recomputation never keeps more, either. With a split backward it may: values that wait for delayed
        weight gradients may be larger than those it drops."""
        return self.comparable and not schedule_of(self.family.rest["schedule"]).split_backward

    def has(self, layout: Layout, precision: Policy) -> bool:
        """Whether a layout in this precision differs from those of the family only in what these differ in."""
        rest = self.family.rest
        return self.prices.policy == precision and all(getattr(layout, name) == rest[name] for name in rest)

    def __len__(self) -> int:
        """The number of layouts."""
        return sum([len(sizes) for _, sizes in self.family.members])

    @property
    def meshes(self) -> tuple[SimplerMesh, ...]:
        """Meshes whose passes bound those of its layouts: the simplest first, its own last."""
        rest = self.family.rest
        return simpler_meshes(rest["tp"], rest["cp"], rest["ep"], rest["expert_tp"])

    def rough_bound(self, largest: int, mesh: SimplerMesh) -> Seconds:
        """A lower bound of the step time of all its layouts: the rough bound of those with the smallest micro-batch, by
        the passes of one of its `meshes`."""
        return value(self.values, self.share, (self.serial, *mesh), lambda: self._rough_bound(largest, mesh))

    def _rough_bound(self, largest: int, mesh: SimplerMesh) -> Seconds:
        if not self.smallest:
            first: dict[tuple[int, int], list[MemoryOptions]] = {}
            for memory, sizes in self.family.members:
                first.setdefault(sizes[0], []).append(memory)
            for size, memories in first.items():
                self.smallest.extend([self.family.layout(memory, *size) for memory in self._split(memories)[1]])
        return min([self.prices.bounds.roughest(layout, largest, mesh) for layout in self.smallest])

    def rows(self) -> Iterator[Row]:
        """One row for each micro-batch size."""
        distinct = list({id(sizes): sizes for _, sizes in self.family.members}.values())
        which = {id(sizes): {*sizes} for sizes in distinct}
        split: dict[tuple[bool, ...], _Split] = {}
        for number, pair in enumerate(dict.fromkeys(pair for sizes in distinct for pair in sizes)):
            having = tuple([pair in which[id(sizes)] for sizes in distinct])
            if having not in split:
                split[having] = self._split([m for m, sizes in self.family.members if pair in which[id(sizes)]])
            yield Row(self, number, *pair, *split[having])

    def _split(self, memories: list[MemoryOptions]) -> _Split:
        """The options, without those that recompute more than others and are no faster; those with distinct passes;
        and those that recompute more."""
        some = {m.recompute for m in memories} if self.comparable else set[tuple[str, ...]]()
        more = [plain(m.recompute) != m.recompute and plain(m.recompute) in some for m in memories]
        rest = tuple(compress(memories, map(not_, more)))
        return rest, _distinct(rest), tuple(compress(memories, more))

    def quickest(self, memory: MemoryOptions, largest: int) -> Sequence[Passes]:
        """Seconds of passes with micro-batches of `largest` sequences, at the best rates."""
        if memory not in self.quick:
            self.quick[memory] = self.prices.bounds.quickest(self.family.layout(memory, 1, 1), largest)
        return self.quick[memory]


@dataclass(frozen=True, slots=True)
class Row:
    """Layouts of a branch with one micro-batch size: they differ only in `MemoryOptions`.

    number    its place in the branch
    distinct  one of each that have equal passes
    more      those that recompute more than another one, and so are no faster. They wait until the others are priced,
              and become a `second` row then
    at_least  the bounds of layouts, where they are known; `known_floors`: those of their memory
    kept      what they keep for each sequence with other recomputations, by options that change it
    """

    branch: Branch
    number: int
    size: int
    steps: int
    memories: tuple[MemoryOptions, ...]
    distinct: tuple[MemoryOptions, ...]
    more: tuple[MemoryOptions, ...] = ()
    fits: dict[MemoryOptions, LayoutEstimate] = field(default_factory=lambda: {})
    higher: dict[MemoryOptions, Higher] = field(default_factory=lambda: {})
    second: bool = False
    at_least: dict[MemoryOptions, Seconds] = field(default_factory=lambda: {})
    known_floors: dict[MemoryOptions, Bytes] = field(default_factory=lambda: {})
    kept: dict[object, Sequence[Sequence[Bytes]]] = field(default_factory=lambda: {})

    def __len__(self) -> int:
        """The number of layouts, with those in `more`."""
        return len(self.memories) + len(self.more)

    def layout(self, memory: MemoryOptions) -> Layout:
        """The row's layout with these memory options."""
        return self.branch.family.layout(memory, self.size, self.steps)

    def bound(self) -> Seconds:
        """A lower bound of the step time of all its layouts."""
        bounds = self.branch.prices.bounds
        return self.value("bound", lambda: min(map(bounds.at_least, map(self.layout, self.distinct))))

    def rough_bound(self, largest: int) -> Seconds:
        """A looser bound, from passes with the largest micro-batch of any row."""
        bounds, quickest = self.branch.prices.bounds, self.branch.quickest

        def least() -> Seconds:
            return min([bounds.roughly(self.layout(m), largest, quickest(m, largest)) for m in self.distinct])

        return self.value("rough", least)

    def fitting_bound(self, usable: Bytes) -> Seconds:
        """The least bound of its layouts that may fit, each with its ZeRO stage; 0 if none may: then pricing costs
        nothing. Those in `more` would not be asked: the row has none."""
        assert not self.more

        def bounds() -> dict[MemoryOptions, Seconds]:
            may_fit = self._may_fit(usable) if usable else ()
            return {memory: self.branch.prices.bounds.of(self.layout(memory)) for memory in may_fit}

        found = self.value("fitting", bounds)
        self.at_least.update(found)
        return min(found.values(), default=0.0)

    def price(self, found: Priced) -> Row | None:
        """Put the layouts into `found`: those that fit, and those that need no estimate because others fit. Returns the
        row of those that are left, if any.

        A larger micro-batch than one that does not fit does not fit either. Recomputation keeps no more and is no
        faster, unless `Branch.spares` is False. A higher ZeRO stage than one that fits is seldom faster: it waits, and
        counts as needless until it is among the best.
        """
        fits, higher, spares = self.fits, self.higher, self.branch.spares
        prices, too_large, floor = self.branch.prices, self.branch.too_large, self._floor()
        sent = self.branch.values.computed(self._key("price"), self.branch.share)
        outcomes: dict[MemoryOptions, Evaluated] = {} if sent is None else sent
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
            elif estimate := self._within(found, memory, floor, outcomes):
                fits[memory] = estimate
                found.fits.append(estimate)
            else:
                found.refused[TOO_LARGE] += 1
                too_large[memory] = self.size
        if sent is None:
            self.branch.values.put(self._key("price"), outcomes)
        left: list[MemoryOptions] = []
        for memory in self.more:
            twin = fits.get(memory._replace(recompute=plain(memory.recompute))) if spares else None
            if twin:
                found.slower.append(Slower(twin, self.layout, memory))
            else:
                left.append(memory)
        return replace(self, memories=tuple(left), distinct=_distinct(left), more=(), second=True) if left else None

    def _within(
        self, found: Priced, memory: MemoryOptions, floor: Callable[[MemoryOptions], Bytes],
        outcomes: dict[MemoryOptions, Evaluated],
    ) -> LayoutEstimate | None:  # fmt: skip
        """Like `Priced.within`, but a miss by the lower bound is recorded only as long as nothing fits."""
        prices = self.branch.prices
        if (outcome := outcomes.get(memory)) is None:
            least = floor(memory) if found.usable else 0
            outcome = outcomes[memory] = found.evaluated(prices, self.layout(memory), least, self.at_least.get(memory))
        if outcome.memory is None and found.fits:
            return None
        return found.recorded(prices, self.layout(memory), outcome)

    def value(self, name: str, compute: Callable[[], T], *more: object) -> T:
        """A value of this row: from whom it is known, or computed."""
        return value(self.branch.values, self.branch.share, self._key(name, *more), compute)

    def _key(self, name: str, *more: object) -> Key:
        return self.branch.serial, self.number, self.second, name, *more

    def may_fit(self, usable: Bytes) -> list[MemoryOptions]:
        """The options whose lower bound of memory is within `usable` bytes, without those of which a smaller
        micro-batch does not fit."""
        return self.value("may fit", lambda: self._may_fit(usable))

    def _may_fit(self, usable: Bytes) -> list[MemoryOptions]:
        too_large, floor = self.branch.too_large, self._floor()
        some = [m for m in self.memories if self.size <= too_large.get(m, self.size) and floor(m) <= usable]
        prices = self.branch.prices
        return [m for m in some if not unfit(prices, self.layout(m))] if prices.policy.fp8 else some

    def floors(self, memory: MemoryOptions, some: Sequence[Mapping[str, Any]]) -> list[Bytes]:
        """Lower bounds of the bytes of a layout with each of `some` recomputations. Without FP8, what a micro-batch
        keeps does not depend on how state is sharded."""
        prices = self.branch.prices
        layout, key = self.layout(memory), memory if prices.policy.fp8 else memory[_RECOMPUTE + 1 :]
        if (kept := self.kept.get(key)) is None:
            each = [layout.put(**less) for less in some]
            kept = self.kept[key] = [prices.kept(less, prices.growth(less)) for less in each]
        resident = self.branch.resident_bytes(memory, layout)
        return [most(resident, own, self.size) for own in kept]

    def _floor(self) -> Callable[[MemoryOptions], Bytes]:
        """A lower bound of the bytes of each of these layouts, as a function."""
        branch, floors, kept = self.branch, self.known_floors, dict[Growths, list[Bytes]]()

        def floor(memory: MemoryOptions) -> Bytes:
            if (found := floors.get(memory)) is None:
                least = branch.least(memory)
                if least.growth not in kept:
                    kept[least.growth] = branch.prices.kept(self.layout(memory), least.growth)
                found = floors[memory] = least.total(kept[least.growth], self.size)
            return found

        return floor


def _distinct(memories: Iterable[MemoryOptions]) -> tuple[MemoryOptions, ...]:
    """One of each that have equal passes."""
    return tuple({(m.recompute, m.attention, m.loss, m.loss_chunk, m.elementwise, m.fuse, m.experts,
                   m.collectives): m for m in memories}.values())  # fmt: skip


Sharing = tuple[int, bool, bool]  # zero, reduce_scatter_once, reshard_after_step


def lower_stages(zero: int, reduce_scatter_once: bool, reshard_after_step: bool) -> tuple[Sharing, ...]:
    """Ways of sharding with less communication in each micro-batch: they are seldom slower."""
    if zero < 2:
        return ()
    one = (1, False, False)
    return (one,) if zero == 2 or reduce_scatter_once or reshard_after_step else (
        one, (2, False, False), (3, True, False), (3, False, True)
    )  # fmt: skip


@cache
def _lower(memory: MemoryOptions, *, spares: bool) -> list[MemoryOptions]:
    """The same options with lower ZeRO stages, and no more recomputation."""
    stages = lower_stages(memory.zero, memory.reduce_scatter_once, memory.reshard_after_step)
    found = [memory._replace(zero=z, reduce_scatter_once=w, reshard_after_step=k) for z, w, k in stages]
    if spares and (recompute := plain(memory.recompute)) != memory.recompute:
        found += [m._replace(recompute=recompute) for m in found]
    return found
