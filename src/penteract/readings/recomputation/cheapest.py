"""The cheapest recomputation within a memory budget.

What a set of ops keeps and what it recomputes follow from the tape (`choices.py`). Its cost is the sum of the seconds
of what it recomputes. Whether it fits is decided by the layout's exact memory.

The result is exact in this sense. *One set for all layers*: no cheaper set of ops fits. *Two sets*, one for the first n
layers of each stage and one for the rest: no cheaper combination fits, over all n and all pairs of sets of the frontier
(sets that no other set beats in both memory and cost). A set outside the frontier could help only by smaller temporary
activations; such pairs are not tried. If there are more than `MANY` distinct sets, one set for all layers is also
searched on the frontier only.

Both searches go from the lowest cost up. A lower bound of memory saves most exact estimates: kept activations add up
over layers and micro-batches in flight, those that recomputation cannot drop are always there, and temporary
activations are at least those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import ceil, inf
from typing import TypeVar

from penteract.config.layout import Layout
from penteract.config.recompute import NONE, MemoryBudget
from penteract.errors import BadInput
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD, LayerType
from penteract.readings.layers.stages import StageLayers, StageSum
from penteract.readings.recomputation.choices import Choice, Choices, hull
from penteract.schedule.in_flight import most_in_flight
from penteract.units import Bytes, Seconds, show_bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    """A layout within a budget, with its estimate, and the estimate without recomputation (`plain`). `cost`: seconds of
    recomputation per micro-batch, on the rank with most of it."""

    estimate: LayoutEstimate
    plain: LayoutEstimate
    cost: Seconds

    @property
    def layout(self) -> Layout:
        """The layout with the recomputation that was chosen."""
        return self.estimate.layout

    def text(self) -> str:
        """What was chosen, how much memory it saves, and what it costs."""
        lay, less = self.layout, self.plain.allocated - self.estimate.allocated
        op_names = " ".join(w for w in lay.recompute if w not in NONE) or "nothing"
        where = "every layer" if lay.uniform else f"the first {lay.recompute_first} layers of a stage"
        others = " ".join(w for w in lay.recompute_else if w not in NONE) or "nothing"
        rest = "" if lay.uniform else f", {others} in the rest"
        spared = f"{show_bytes(less)} less a rank" if less >= 0 else f"{show_bytes(-less)} more a rank"
        return f"recomputes {op_names} in {where}{rest}: {spared}, {self.cost * 1e3:.3g} ms more a micro-batch"


def within(estimator: Estimator, layout: Layout, budget: MemoryBudget) -> Chosen:
    """The cheapest recomputation of `layout` within `budget`. If none fits, raises BadInput with the least memory that
    can be reached."""
    plain = estimator.estimate(_uniform(layout, NONE))
    kept = plain.memory["activations"]
    limit = budget.allocated or plain.allocated - (1 - budget.fraction) * kept
    solver = _Solver.of(estimator, layout, plain, limit)
    best = solver.mixed(solver.uniform())
    if best is None:
        least = solver.leanest()
        share = ceil(1000 * (least - plain.allocated + kept) / kept) / 1000
        found = show_bytes(budget.allocated) if budget.allocated else f"{budget.fraction:g} of the activations"
        reach = show_bytes(least) if budget.allocated else f"{share:.3f}"
        fix = f"{reach} or more, a smaller micro-batch, or memory.offload layer_inputs"
        where = "memory.budget_gib" if budget.allocated else "memory.budget"
        raise BadInput("BUDGET", "no recomputation keeps so little", where=where, found=found,
                       allowed=f"at least {reach}", fix=fix)  # fmt: skip
    return Chosen(estimator.estimate(best[1]), plain, best[0])


_Found = tuple[Seconds, Layout]
_Sums = tuple[tuple[tuple[Sequence[Bytes], Sequence[Seconds]], ...], ...]
_Amount = TypeVar("_Amount", int, float)
_Temporaries = tuple[Bytes, Bytes]  # in the arena, and of routed size


@dataclass(frozen=True, slots=True)
class _Rank:
    """A pipeline rank.

    chunks  of each model chunk, its layers: the index in the stage (-1 for embedding and head, which recompute the ops
            of the first layers), and the index of the layer type in `Choice`
    base    of each chunk, bytes that no choice drops
    spread  (layer type, its first and its last index in the stage)
    flight  micro-batches in flight; `room`: bytes for activations
    """

    chunks: tuple[tuple[tuple[int, int], ...], ...]
    spread: tuple[tuple[int, int, int], ...]
    base: tuple[Bytes, ...]
    flight: int
    room: float


@dataclass(frozen=True, slots=True)
class _Solver:
    estimator: Estimator
    layout: Layout
    kinds: tuple[LayerType, ...]
    choices: Choices
    ranks: tuple[_Rank, ...]
    limit: float  # total bytes of the fullest rank
    depth: int  # layers of the longest stage
    summed: dict[tuple[str, ...], _Sums] = field(default_factory=dict[tuple[str, ...], _Sums])
    temporaries: dict[tuple[str, ...], tuple[_Temporaries, ...]] = field(
        default_factory=dict[tuple[str, ...], tuple[_Temporaries, ...]]
    )

    @staticmethod
    def of(estimator: Estimator, layout: Layout, plain: LayoutEstimate, limit: float) -> _Solver:
        lay, composer = plain.layout, estimator.composer
        by_rank = composer.assignment(lay).by_rank
        kinds = tuple(dict.fromkeys(k for chains in by_rank for chain in chains for k, _ in chain))
        choices = Choices.of(estimator, kinds, lay)
        none = next(c for c in choices.every if c.op_names == NONE)
        back = "Inp" if lay.split_backward else "Bwd"
        members = tuple((c, ("Fwd", back)) for c in range(lay.vpp))
        flights = most_in_flight(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, members)
        ranks = list[_Rank]()
        for r, chains in enumerate(by_rank):
            chunks = tuple(tuple(_placed(chain, kinds)) for chain in chains)
            own = composer.rank(lay, r)
            base = tuple(
                _through(stage) - sum(none.kept[k] for _, k in chunk)
                for stage, chunk in zip(composer.stages(lay, r), chunks, strict=True)
            )
            fixed = plain.by_pp_rank[r] - own.arena - own.routed
            places = {
                k: [at for chunk in chunks for at, kind in chunk if kind == k] for chunk in chunks for _, k in chunk
            }
            spread = tuple((k, min(some), max(some)) for k, some in places.items())
            ranks.append(_Rank(chunks, spread, base, flights[r], limit - fixed))
        depth = max(place + 1 for rank in ranks for chunk in rank.chunks for place, _ in chunk)
        return _Solver(estimator, layout, kinds, choices, tuple(ranks), limit, depth)

    # ---- sums ----------------------------------------------------------------------------------------------------

    def cost(self, lean: Choice, rest: Choice, first: int) -> Seconds:
        """Seconds of recomputation per micro-batch on the rank with most, with `lean` for the `first` layers of each
        stage."""
        return max(
            [
                sum([_joined(x, y, first) for (_, x), (_, y) in zip(m, n, strict=True)])
                for m, n in zip(self._sums(lean), self._sums(rest), strict=True)
            ]
        )

    def may_fit(self, lean: Choice, rest: Choice, first: int) -> bool:
        """Whether a lower bound of each rank's activations fits."""
        for rank, m, n in zip(self.ranks, self._sums(lean), self._sums(rest), strict=True):
            kept = min([_joined(x, y, first) + base for (x, _), (y, _), base in zip(m, n, rank.base, strict=True)])
            left = rank.room - rank.flight * kept
            if left < 0 or left < self.temporary(rank, lean, rest, first):
                return False
        return True

    def temporary(self, rank: _Rank, lean: Choice, rest: Choice, first: int) -> Bytes:
        """A lower bound of temporary activations: those of the layer with most."""
        a, b = self._temporary(lean), self._temporary(rest)
        there = [a[k] for k, lowest, _ in rank.spread if lowest < first]
        there += [b[k] for k, _, highest in rank.spread if highest >= first]
        return max([planned for planned, _ in there]) + max([routed for _, routed in there])

    def _temporary(self, choice: Choice) -> tuple[_Temporaries, ...]:
        """Temporary activations of each layer type."""
        if choice.op_names not in self.temporaries:
            layout = _uniform(self.layout, choice.op_names)
            layers = [self.estimator.composer.layer_memory(layout, kind) for kind in self.kinds]
            self.temporaries[choice.op_names] = tuple(
                [(max(m.temporary.values(), default=0), max(m.routed_temporary.values(), default=0)) for m in layers]
            )
        return self.temporaries[choice.op_names]

    def _sums(self, choice: Choice) -> _Sums:
        """Kept bytes and recomputation seconds of each rank and chunk: of embedding and head, with the first 0, 1, 2, …
        layers."""
        if choice.op_names not in self.summed:
            self.summed[choice.op_names] = tuple(
                tuple([(_summed(chunk, choice.kept), _summed(chunk, choice.cost)) for chunk in rank.chunks])
                for rank in self.ranks
            )
        return self.summed[choice.op_names]

    def fits(self, layout: Layout) -> bool:
        """Whether the exact memory of a layout is within the limit."""
        return self.estimator.memory_of(layout).allocated <= self.limit

    def leanest(self) -> Bytes:
        """The least total memory with one set of the frontier for all layers."""
        return min(
            [self.estimator.memory_of(_uniform(self.layout, c.op_names)).allocated for c in self.choices.frontier]
        )

    # ---- searches ------------------------------------------------------------------------------------------------

    def uniform(self) -> _Found | None:
        """One set for all layers: the cheapest that fits."""
        depth = self.depth
        some = [(self.cost(c, c, depth), len(c.op_names), c) for c in self.choices.every]
        for cost, _, choice in sorted(some):
            layout = _uniform(self.layout, choice.op_names)
            if self.may_fit(choice, choice, depth) and self.fits(layout):
                return cost, layout
        return None

    def mixed(self, best: _Found | None) -> _Found | None:
        """Two sets, if that is cheaper than `best`. A few pairs come first: their result rules out most others."""
        best = self._search(hull(self.choices.frontier), best)
        return self._search(self.choices.frontier, best)

    def _search(self, some: Sequence[Choice], best: _Found | None) -> _Found | None:
        """Search pairs of `some`, from the lowest cost that may fit."""
        waiting = list(self._pairs(some, best[0] if best else inf))
        heapify(waiting)
        while waiting:
            cost, op_names, at, lean, rest = heappop(waiting)
            if best is not None and cost >= best[0]:
                break
            order = self._order(lean, rest)
            if self.may_fit(lean, rest, order[at]) and self.fits(layout := self._shared(lean, rest, order[at])):
                return cost, layout
            if at + 1 < len(order):
                heappush(waiting, (self.cost(lean, rest, order[at + 1]), op_names, at + 1, lean, rest))
        return best

    def _pairs(
        self, some: Sequence[Choice], cost: Seconds
    ) -> Iterator[tuple[Seconds, tuple[int, int], int, Choice, Choice]]:
        """For each pair that costs less than `cost`, the cheapest number of layers with which it may fit: (cost,
        (number of ops, serial), index in `_order`, lean, rest)."""
        number, steady = 0, sum(kind not in EMBEDDING_AND_HEAD for kind in self.kinds) == 1
        others = self._in_layers(some)
        for lean in some if self.depth > 1 else ():
            for rest in others:
                if lean is rest or (steady and not self._between(lean, rest, cost)):
                    continue
                order = self._order(lean, rest)
                at = self._first(lean, rest, order, steady=steady)
                if at is not None and (bound := self.cost(lean, rest, order[at])) < cost:
                    number += 1
                    yield bound, (len(lean.op_names) + len(rest.op_names), number), at, lean, rest

    def _first(self, lean: Choice, rest: Choice, order: range, *, steady: bool) -> int | None:
        """The first index of `order` that may fit. `steady`: there is one type of layer, so that kept bytes are
        monotone in the number of layers."""
        if self.may_fit(lean, rest, order[0]):
            return 0
        if not steady:
            return next((at for at, n in enumerate(order) if self.may_fit(lean, rest, n)), None)
        low, high = 0, len(order) - 1
        if not self.may_fit(lean, rest, order[high]):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.may_fit(lean, rest, order[middle]) else (middle, high)
        return high

    def _in_layers(self, some: Sequence[Choice]) -> list[Choice]:
        """The distinct sets for the rest of the layers. Sets that differ only in embedding and head are equal here, as
        these use the other set; the one with fewest ops is taken."""
        places = [k for k, kind in enumerate(self.kinds) if kind not in EMBEDDING_AND_HEAD]
        found = dict[tuple[object, ...], Choice]()
        for c in sorted(some, key=lambda c: len(c.op_names)):
            found.setdefault(tuple([(c.kept[k], c.cost[k]) for k in places]), c)
        return list(found.values())

    def _between(self, lean: Choice, rest: Choice, cost: Seconds) -> bool:
        """Whether some fractional number of layers could make a pair fit and cost less than `cost`. Both are linear in
        that number, on a rank with one chunk of the largest depth."""
        last = self.depth - 1
        for rank, m, n in zip(self.ranks, self._sums(lean), self._sums(rest), strict=True):
            (x, u), (y, v) = m[0], n[0]
            if len(m) > 1 or len(x) <= self.depth:
                continue
            low, high = _under(_joined(x, y, 1), _joined(x, y, last), rank.room / rank.flight - rank.base[0])
            least, most = _under(_joined(u, v, 1), _joined(u, v, last), cost)
            if max(low, least) > min(high, most) + 1e-9:
                return False
        return True

    def _order(self, lean: Choice, rest: Choice) -> range:
        """Numbers of layers for the first set, the cheapest first."""
        fewest, most = 1, self.depth - 1
        if self.cost(lean, rest, most) >= self.cost(lean, rest, fewest):
            return range(fewest, most + 1)
        return range(most, fewest - 1, -1)

    def _shared(self, lean: Choice, rest: Choice, first: int) -> Layout:
        return replace(
            self.layout, recompute=lean.op_names, recompute_every=1, recompute_first=first, recompute_else=rest.op_names
        )


def _under(begin: float, end: float, limit: float) -> tuple[float, float]:
    """The part of [0, 1] in which a line from `begin` to `end` is at most `limit`: empty if its first number is larger
    than its second."""
    if begin <= limit and end <= limit:
        return 0.0, 1.0
    if begin > limit and end > limit:
        return 2.0, -1.0
    at = (limit - begin) / (end - begin)
    return (0.0, at) if begin <= limit else (at, 1.0)


def _through(stage: StageSum) -> Bytes:
    """Bytes that a micro-batch keeps from its forward to its backward."""
    spans = (*stage.buffers.items(), *stage.routed.items())
    return sum(n for (born, dies), n in spans if born == "Fwd" and dies in ("Bwd", "Inp", "Wgt"))


def _placed(chain: StageLayers, kinds: Sequence[LayerType]) -> Iterator[tuple[int, int]]:
    """For each layer of a stage: its index (-1 for embedding and head), and that of its type."""
    place = 0
    for kind, n in chain:
        for _ in range(n):
            yield -1 if kind in EMBEDDING_AND_HEAD else place, kinds.index(kind)
            place += kind not in EMBEDDING_AND_HEAD


def _summed(chunk: Sequence[tuple[int, int]], each: Sequence[_Amount]) -> Sequence[_Amount]:
    """The sum of embedding and head; then the same with the first layer, with the first two, and so on."""
    ends = [each[k] for place, k in chunk if place < 0] or [each[0] - each[0]]
    layers = [each[k] for place, k in chunk if place >= 0]
    return list(accumulate(layers, initial=sum(ends[1:], ends[0])))


def _joined(lean: Sequence[_Amount], rest: Sequence[_Amount], first: int) -> _Amount:
    """The sum with embedding, head and the `first` layers of `lean`, and the other layers of `rest`."""
    n = min(first, len(lean) - 1)
    return lean[n] + rest[-1] - rest[n]


def _uniform(layout: Layout, op_names: tuple[str, ...]) -> Layout:
    return replace(layout, recompute=op_names, recompute_every=1, recompute_first=0, recompute_else=NONE)
