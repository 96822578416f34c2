"""Recomputation between none and full, for layouts that need some: of a few kinds, the cheapest that fits.

A candidate is a layout that may fit with full recomputation, but does not fit with none. Its time without recomputation
is a lower bound of its time with some: by this bound, and first by that of its row, candidates are one more source of a
search. Bounds of memory cost less than bounds of time: a candidate of which no recomputation can fit gets no bound of
its own. Of a candidate's recomputations, the first that fits is kept: each costs more than the one before. Those that
cost no less than what a lower ZeRO stage needs wait with their bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.recompute import NONE
from penteract.parallel.pipeline import stage_layers
from penteract.planner.ask import EDITS, RECOMPUTE, Ask
from penteract.planner.search.frontier import Frontier
from penteract.planner.search.priced import TOO_LARGE, Higher
from penteract.planner.search.rows import Branch, Row, Sharing, lower_stages
from penteract.planner.space.layout_families import MemoryOptions
from penteract.readings.estimator import LayoutEstimate
from penteract.units import Bytes, Seconds

_FULL = RECOMPUTE["full"]


@dataclass(slots=True)
class Between:
    """How many layouts were considered.

    candidates  layouts that fit with full recomputation, or may fit
    looked_at   candidates that do not fit without recomputation and could be among the best. Of those that cannot fit
                with some, either, the bound of their row says so
    tried       layouts with some recomputation; `fit`: how many of them fit
    """

    candidates: int = 0
    looked_at: int = 0
    tried: int = 0
    fit: int = 0


def recomputations(model: ModelSpec) -> tuple[Mapping[str, Any], ...]:
    """Fields of a layout, the cheapest first: the activation function; norms, too; every second layer as a whole."""
    norm = "rms_norm" if model.norm == "rms" else "layer_norm"
    return (
        {"recompute": (*NONE, model.activation)},
        {"recompute": (*NONE, norm, model.activation)},
        {"recompute": _FULL, "recompute_every": 2, "recompute_else": NONE},
    )


# The present bound of time, the ZeRO stage, the serial, lower bounds of memory of each recomputation if they are known.
_Waiting = tuple[Seconds, int, int, "Sequence[Bytes] | None", Row, MemoryOptions]


@dataclass(slots=True)
class SelectiveSource:
    """A source of layouts with some recomputation, for a search over `frontier`, whose rows with full recomputation
    are its candidates. Those that are tried and do not fit are counted there as refused. `counts` is updated."""

    frontier: Frontier
    some: Sequence[Mapping[str, Any]]
    counts: Between
    _heap: list[_Waiting] = field(default_factory=list["_Waiting"])
    _taken: int = 0  # how many rows with full recomputation are in the heap already
    # By identity: a branch, which is kept so that no other gets it, and the recomputations that differ.
    _of_branch: dict[int, tuple[Branch, Sequence[Mapping[str, Any]]]] = field(
        default_factory=dict[int, "tuple[Branch, Sequence[Mapping[str, Any]]]"]
    )
    # By all but the sharding: the recomputation of each sharding that was tried, by its place in `some`.
    _reached: dict[object, dict[Sharing, tuple[int, LayoutEstimate | Higher]]] = field(
        default_factory=dict[object, "dict[Sharing, tuple[int, LayoutEstimate | Higher]]"]
    )

    @property
    def lowest(self) -> Seconds:
        """A lower bound of the time of all remaining candidates; infinite if there are none."""
        rows, found = self.frontier.seconds, self.frontier.found
        for bound, row in rows[self._taken :]:
            for memory in row.may_fit(found.usable):
                if memory._replace(recompute=NONE) not in row.fits:  # else it needs none
                    heappush(self._heap, (bound, memory.zero, self.counts.candidates, None, row, memory))
                self.counts.candidates += 1
        self._taken = len(rows)
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> None:
        """Try the candidate with the lowest bound, or put it back with its own bound, which that of its row is not."""
        bound, zero, serial, sizes, row, memory = heappop(self._heap)
        none = memory._replace(recompute=NONE)
        if sizes is None:
            if not (sizes := self._sizes(row, memory)):
                return
            if (closer := row.value("of none", lambda: row.branch.prices.bounds.of(row.layout(none)), memory)) > bound:
                heappush(self._heap, (closer, zero, serial, sizes, row, memory))
                return
        own = _sharing(memory)
        lower = lower_stages(*own)
        if not self._needless(row, none, lower):
            self._try(row, memory, own, lower, sizes)

    def _sizes(self, row: Row, memory: MemoryOptions) -> Sequence[Bytes]:
        """Lower bounds of memory of each recomputation; none if no recomputation can fit: then they are counted."""
        found, some = self.frontier.found, self._some(row)
        sizes = row.value("floors", lambda: row.floors(memory, some), memory)
        if min(sizes) <= found.usable:
            return sizes
        self.counts.looked_at += 1
        self.counts.tried += len(some)
        found.refused[TOO_LARGE] += len(some)
        if not found.fits:
            for size, less in zip(sizes, self._options(row, memory), strict=True):
                found.miss(size, less, row.branch.prices.policy)
        return ()

    def _some(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """These recomputations of a row. Every second layer of a stage is all of one that has a single layer."""
        if (entry := self._of_branch.get(id(row.branch))) is None:
            model = row.branch.prices.composer.model
            layers = stage_layers(model.layers, row.layout(row.memories[0]))
            longest = max(map(len, layers)) + model.mtp_layers
            some = [less for less in self.some if less.get("recompute_every", 1) <= longest]
            entry = self._of_branch[id(row.branch)] = row.branch, some
        return entry[1]

    def _options(self, row: Row, memory: MemoryOptions) -> tuple[Layout, ...]:
        """The layouts of these recomputations."""
        layout = row.layout(memory)
        return tuple([layout.put(**less) for less in self._some(row)])

    def _try(
        self, row: Row, memory: MemoryOptions, own: Sharing, lower: Iterable[Sharing], sizes: Sequence[Bytes]
    ) -> None:
        """Keep the first recomputation that fits. `own`: how the candidate is sharded; `lower`: lower stages than that;
        `sizes`: lower bounds of memory."""
        prices, found, layout = row.branch.prices, self.frontier.found, row.layout(memory)
        self.counts.looked_at += 1
        by_sharing = self._reached.setdefault((_rest(layout), prices.policy), {})
        simpler = [by_sharing[s] for s in lower if s in by_sharing]
        options = self._options(row, memory)
        enough = min([i for i, _ in simpler], default=len(options))
        for i, less in enumerate(options[:enough]):
            self.counts.tried += 1
            outcome = row.value("some", lambda at=i, lay=less: found.evaluated(prices, lay, sizes[at]), memory, i)
            if estimate := found.recorded(prices, less, outcome):
                self.counts.fit += 1
                by_sharing[own] = i, estimate
                found.fits.append(estimate)
                return
            found.refused[TOO_LARGE] += 1
        if options[enough:]:
            higher = Higher(options[enough:], prices, tuple([one for _, one in simpler]), self.counts)
            found.higher.append(higher)
            by_sharing[own] = enough, higher

    def _needless(self, row: Row, none: MemoryOptions, lower: Iterable[Sharing]) -> bool:
        """Whether no recomputation is needed (`none`): a layout with less sharding fits without any, and this one is
        not known not to."""
        if not any(none._replace(**dict(zip(_SHARING, s, strict=True))) in row.fits for s in lower):
            return False
        usable, prices = self.frontier.found.usable, row.branch.prices
        return row.value("fits", lambda: prices.memory_of(row.layout(none)).allocated <= usable, none)


def candidates(ask: Ask, frontier: Frontier, counts: Between) -> tuple[SelectiveSource, ...]:
    """Layouts with some recomputation; nothing if recomputation or offload is pinned, or if memory is not known."""
    if not ask.usable or {*EDITS} & ask.pins.keys():
        return ()
    return (SelectiveSource(frontier, recomputations(ask.model), counts),)


# Getters of how state is sharded, and of all fields but these and `recompute`: compared layouts agree in the latter.
_SHARING = ("zero", "reduce_scatter_once", "reshard_after_step")
_sharing = attrgetter(*_SHARING)
_rest = attrgetter(*(f.name for f in fields(Layout) if f.name not in (*_SHARING, "recompute")))
