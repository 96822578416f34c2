"""The recomputation that costs least within a memory, solved exactly.

What a set of words drops, and what it makes again, is read off the tape (`ops/fates.py`); its cost are the seconds of
what it makes again, which is a sum. So sets are tried from the cheapest up, and the first that fits by its real price
is the best: a bound on what it keeps spares the price of most. Then two sets share the layers, the first n of a stage
with the one that keeps less, by branch and bound: among sets that none betters in both what they keep and cost, and so
is the search for one set where there are very many (experts over tensor ranks know tens of thousands).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple, TypeVar

from penteract.errors import BadInput
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import ENDS, Kind, bytes_of, sight
from penteract.estimate.quote import Quote, Quoter
from penteract.estimate.stages import Chain
from penteract.estimate.timing import seconds_alone
from penteract.ops.fates import Fate, Fates, sets
from penteract.ops.tape import Tape
from penteract.schedule.in_flight import most_in_flight
from penteract.spec.layout import Layout
from penteract.spec.recompute import NONE, Budget
from penteract.units import Bytes, Seconds, show_bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    """A layout within a budget, with its quote and that of the same without recomputation. `cost`: seconds of what a
    micro-batch makes again on the rank that makes most."""

    quote: Quote
    plain: Quote
    cost: Seconds

    @property
    def layout(self) -> Layout:
        return self.quote.layout

    def text(self) -> str:
        """What was chosen, what it spares, and what it costs."""
        lay, less = self.layout, self.plain.allocated - self.quote.allocated
        words = " ".join(w for w in lay.remake if w not in NONE) or "nothing"
        where = "every layer" if lay.uniform else f"the first {lay.remake_first} layers of a stage"
        others = " ".join(w for w in lay.remake_else if w not in NONE) or "nothing"
        rest = "" if lay.uniform else f", {others} in the rest"
        spared = f"{show_bytes(less)} less a GPU" if less >= 0 else f"{show_bytes(-less)} more a GPU"
        return f"remakes {words} in {where}{rest}: {spared}, {self.cost * 1e3:.3g} ms more a micro-batch"


class Choice(NamedTuple):
    """A set of words: what each kind of piece keeps of what could be dropped, and the seconds of what it remakes."""

    words: tuple[str, ...]
    kept: tuple[Bytes, ...]
    cost: tuple[Seconds, ...]


def within(quoter: Quoter, layout: Layout, budget: Budget) -> Chosen:
    """The cheapest recomputation of `layout` within `budget`. Raises BadInput, naming the least that can be reached."""
    plain = quoter.quote(_uniform(layout, NONE))
    limit = budget.allocated or budget.fraction * plain.memory["activations"]

    def size(quote: Quote) -> Bytes:
        return quote.allocated if budget.allocated else quote.memory["activations"]

    solver = _Solver.of(quoter, layout)
    uniform = solver.uniform(lambda quote: size(quote) <= limit, limit)
    best = solver.mixed(lambda quote: size(quote) <= limit, limit, uniform)
    if best is None:
        least = solver.leanest(size)
        share = ceil(1000 * least / plain.memory["activations"]) / 1000
        found = show_bytes(budget.allocated) if budget.allocated else f"{budget.fraction:g} of the activations"
        reach = show_bytes(least) if budget.allocated else f"{share:.3f}"
        fix = f"{reach} or more, a smaller micro-batch, or memory.offload anchors"
        where = "memory.budget_gib" if budget.allocated else "memory.budget"
        raise BadInput("BUDGET", "no recomputation keeps so little", where=where, found=found,
                       allowed=f"at least {reach}", fix=fix)  # fmt: skip
    return Chosen(quoter.quote(best[1]), plain, best[0])


_Found = tuple[Seconds, Layout]
_Sums = tuple[tuple[tuple[Sequence[Bytes], Sequence[Seconds]], ...], ...]
_Amount = TypeVar("_Amount", int, float)
_MANY = 1024  # sets


@dataclass(frozen=True, slots=True)
class _Solver:
    """`chunks`: of each pipeline rank and chunk, the pieces: their place in the stage (-1: an end, which has the words
    of the first layers) and that of their kind in `Choice`. `flights`: how many micro-batches each rank holds."""

    quoter: Quoter
    layout: Layout
    choices: tuple[Choice, ...]
    frontier: tuple[Choice, ...]  # those that none betters in both what they keep and cost
    chunks: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    flights: tuple[int, ...]
    summed: dict[tuple[str, ...], _Sums]

    @staticmethod
    def of(quoter: Quoter, layout: Layout) -> _Solver:
        plain, composer = _uniform(layout, NONE), quoter.composer
        by_rank = composer.deal(plain).by_rank
        kinds = list(dict.fromkeys(k for chains in by_rank for chain in chains for k, _ in chain))
        tapes = [composer.recorder.tape(kind, plain) for kind in kinds]
        measure = [_measure(quoter, kind, tape, plain) for kind, tape in zip(kinds, tapes, strict=True)]
        choices = [
            Choice(tuple(dict.fromkeys((*NONE, *sorted(words)))), *zip(*map(_told, measure, fates), strict=True))
            for words, fates in sets([Fates.of(tape) for tape in tapes], NONE)
        ]
        chunks = tuple(tuple(tuple(_placed(chain, kinds)) for chain in chains) for chains in by_rank)
        back = "Inp" if layout.schedule == "zb_h1" else "Bwd"
        members = tuple((c, ("Fwd", back)) for c in range(layout.vpp))
        lay = layout
        flights = most_in_flight(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, members)
        return _Solver(quoter, layout, tuple(choices), _frontier(choices), chunks, flights, {})

    # ---- sums ----------------------------------------------------------------------------------------------------

    def cost(self, lean: Choice, rest: Choice, first: int) -> Seconds:
        """Of a micro-batch on the rank that makes most again, the first layers of each stage with `lean`."""
        a, b = self._sums(lean), self._sums(rest)
        return max(
            sum(_joined(x, y, first) for (_, x), (_, y) in zip(m, n, strict=True)) for m, n in zip(a, b, strict=True)
        )

    def least(self, lean: Choice, rest: Choice, first: int) -> Bytes:
        """A lower bound of the activations of the fullest rank: what is kept by the micro-batches in flight."""
        a, b = self._sums(lean), self._sums(rest)
        return max(
            flight * min(_joined(x, y, first) for (x, _), (y, _) in zip(m, n, strict=True))
            for flight, m, n in zip(self.flights, a, b, strict=True)
        )

    def _sums(self, choice: Choice) -> _Sums:
        """What the ends and the first layers keep and make again, for each number of layers, of each rank and chunk."""
        if choice.words not in self.summed:
            self.summed[choice.words] = tuple(
                tuple((_summed(chunk, choice.kept), _summed(chunk, choice.cost)) for chunk in own)
                for own in self.chunks
            )
        return self.summed[choice.words]

    @property
    def depth(self) -> int:
        """Layers of the longest stage."""
        return max(place + 1 for own in self.chunks for chunk in own for place, _ in chunk)

    def leanest(self, size: Callable[[Quote], Bytes]) -> Bytes:
        """The least that one set for all layers can reach."""
        found: Bytes | None = None
        for bound, choice in sorted(
            ((self.least(c, c, self.depth), c) for c in self.choices), key=lambda pair: pair[0]
        ):
            if found is not None and bound >= found:
                break
            reached = size(self.quoter.quote(_uniform(self.layout, choice.words)))
            found = reached if found is None else min(found, reached)
        assert found is not None
        return found

    # ---- searches ------------------------------------------------------------------------------------------------

    def uniform(self, fits: Callable[[Quote], bool], limit: float) -> _Found | None:
        """One set for all layers: the first that fits, from the cheapest up."""
        depth = self.depth
        some = self.choices if len(self.choices) <= _MANY else self.frontier
        for cost, choice in sorted(((self.cost(c, c, depth), c) for c in some), key=lambda pair: pair[0]):
            layout = _uniform(self.layout, choice.words)
            if self.least(choice, choice, depth) <= limit and fits(self.quoter.quote(layout)):
                return cost, layout
        return None

    def mixed(self, fits: Callable[[Quote], bool], limit: float, best: _Found | None) -> _Found | None:
        """Two sets, where that is cheaper than `best`: pairs from the lowest bound of their cost up."""
        waiting = list(self._pairs(limit, best[0] if best else inf))
        heapify(waiting)
        while waiting:
            bound, _, first, lean, rest = heappop(waiting)
            if best is not None and bound >= best[0]:
                break
            order = self._order(lean, rest)[abs(first - self._order(lean, rest)[0]) :]
            low, high = 0, len(order)  # of `order`, the first that fits
            while low < high:
                middle = (low + high) // 2
                if fits(self.quoter.quote(self._shared(lean, rest, order[middle]))):
                    high = middle
                else:
                    low = middle + 1
            if low < len(order) and (best is None or self.cost(lean, rest, order[low]) < best[0]):
                best = self.cost(lean, rest, order[low]), self._shared(lean, rest, order[low])
        return best

    def _pairs(self, limit: float, cost: Seconds) -> Iterator[tuple[Seconds, tuple[int, int], int, Choice, Choice]]:
        """(bound of its cost, words and number, fewest layers, lean, rest) of those that may cost less than `cost`."""
        frontier, number = self.frontier, 0
        for lean in frontier:
            for rest in frontier:
                order = self._order(lean, rest)
                if lean is rest or not order or self.cost(lean, rest, order[0]) >= cost:
                    continue
                first = next((n for n in order if self.least(lean, rest, n) <= limit), 0)
                if first and self.cost(lean, rest, first) < cost:
                    number += 1
                    words = len(lean.words) + len(rest.words)
                    yield self.cost(lean, rest, first), (words, number), first, lean, rest

    def _order(self, lean: Choice, rest: Choice) -> range:
        """Numbers of layers for the first set, from the cheapest up: what costs more keeps less."""
        fewest, most = 1, self.depth - 1
        if self.cost(lean, rest, most) >= self.cost(lean, rest, fewest):
            return range(fewest, most + 1)
        return range(most, fewest - 1, -1)

    def _shared(self, lean: Choice, rest: Choice, first: int) -> Layout:
        return replace(self.layout, remake=lean.words, remake_every=1, remake_first=first, remake_else=rest.words)


def _frontier(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    found = list[Choice]()
    for c in sorted(choices, key=lambda c: (sum(c.cost), sum(c.kept), len(c.words))):
        if not any(_no_worse(other, c) for other in found):
            found.append(c)
    return tuple(found)


def _placed(chain: Chain, kinds: Sequence[Kind]) -> Iterator[tuple[int, int]]:
    """Each piece of a chain: its place among the layers, and that of its kind."""
    place = 0
    for kind, n in chain:
        for _ in range(n):
            yield -1 if kind in ENDS else place, kinds.index(kind)
            place += kind not in ENDS


def _summed(chunk: Sequence[tuple[int, int]], each: Sequence[_Amount]) -> Sequence[_Amount]:
    """Of the ends, and then of one layer more after another."""
    ends = [each[k] for place, k in chunk if place < 0] or [each[0] - each[0]]
    layers = [each[k] for place, k in chunk if place >= 0]
    return list(accumulate(layers, initial=sum(ends[1:], ends[0])))


def _joined(lean: Sequence[_Amount], rest: Sequence[_Amount], first: int) -> _Amount:
    """The ends and the first layers of one sum, and the rest of another."""
    n = min(first, len(lean) - 1)
    return lean[n] + rest[-1] - rest[n]


def _no_worse(a: Choice, b: Choice) -> bool:
    return all(x <= y for x, y in zip((*a.kept, *a.cost), (*b.kept, *b.cost), strict=True))


def _uniform(layout: Layout, words: tuple[str, ...]) -> Layout:
    return replace(layout, remake=words, remake_every=1, remake_first=0, remake_else=NONE)


_Measure = tuple[Callable[[int], Bytes], Callable[[int], Seconds]]  # of a register; of an op, by its identity


def _measure(quoter: Quoter, kind: Kind, tape: Tape, layout: Layout) -> _Measure:
    composer = quoter.composer
    load = Balanced.of(composer.model, layout, composer.sequence_length)
    piece = composer.piece(kind, layout, sight(layout))
    alone = seconds_alone(piece, quoter.device(layout))
    spent = {id(op): sum(alone.get(place, 0.0) for place in places) for op, places in _places(tape)}
    return lambda r: bytes_of(tape.specs[r], composer.widths, load), spent.__getitem__


def _places(tape: Tape) -> Iterator[tuple[object, range]]:
    """Each op, and the places of its sites among all that lowering can call."""
    at = 0
    for op in tape.ops:
        more = 1 if op.program is None else len(op.program.forward) + len(op.program.backward)
        yield op, range(at, at + more)
        at += more


def _told(measure: _Measure, fate: Fate) -> tuple[Bytes, Seconds]:
    """What is kept, and the seconds of what is made again; those of what is always remade are no cost of a choice."""
    size, seconds = measure
    return sum(map(size, fate.kept)), sum(seconds(id(op)) for op in fate.again if op.site.word not in NONE)
