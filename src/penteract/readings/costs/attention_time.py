"""Seconds of fused attention, from measured shapes: by FLOPs, and by the elements of its queries.

Time beside the products grows with tokens, not with their square: q, k, v and results are read and written, and
backward clears the fp32 sums of gradients, and converts them. On an H200, four sequences of 2,048 tokens take 1.15
times as long as one of 4,096 with as many FLOPs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import fsum
from typing import NamedTuple

from penteract.config.hardware import FusedShape
from penteract.readings.costs.curve import Curve
from penteract.units import Seconds

_BACKWARD = 2.5  # FLOPs of attention's backward over its forward: five products for two
_MOST = 0.9  # of a measured time that may be due to elements


class AttentionTime(NamedTuple):
    """One direction, for one head size. `products`: seconds against executed FLOPs, without masked ones. `element`:
    seconds for each element of the queries (batch · tokens · heads · head size)."""

    products: Curve
    element: Seconds

    def __call__(self, flops: float, elements: int) -> Seconds:
        """Seconds of a call."""
        return max(0.0, self.products(flops)) + self.element * elements  # below its points a curve may fall under 0

    def at_best(self) -> AttentionTime:
        """A lower bound whose seconds per FLOP never rise."""
        return AttentionTime(self.products.at_best(), self.element)


class FusedRates(NamedTuple):
    """Fused attention of one head size, forward and backward."""

    forward: AttentionTime
    backward: AttentionTime


def fused_rates(shapes: Sequence[FusedShape], slower: float) -> tuple[tuple[int, FusedRates], ...]:
    """Rates by head size, the largest first. What is above the latency is stretched by `slower`."""

    def of(head: int, way: int) -> AttentionTime:
        found = list[tuple[float, int, Seconds]]()
        for flops, size, length, *rates in shapes:
            if size == head:
                done = flops * (1.0, _BACKWARD)[way]
                found.append((done, flops // (2 * length), done / (rates[way] * 1e12)))
        element = _per_element(found)
        products = Curve.of((done, seconds - element * elements) for done, elements, seconds in found)
        return AttentionTime(products.stretched(slower), element * slower)

    heads = sorted({size for _, size, *_ in shapes}, reverse=True)
    return tuple((head, FusedRates(of(head, 0), of(head, 1))) for head in heads)


def _per_element(found: Iterable[tuple[float, int, Seconds]]) -> Seconds:
    """Seconds by which shapes with the same FLOPs differ for each element by which they differ: least squares of
    relative errors. 0 if no two shapes have the same FLOPs."""
    by_flops = defaultdict[float, list[tuple[int, Seconds]]](list)
    for flops, elements, seconds in found:
        by_flops[flops].append((elements, seconds))
    above, below = list[float](), list[float]()
    for group in by_flops.values():
        elements, seconds = (fsum(values) / len(group) for values in zip(*group, strict=True))
        for n, took in group:
            above.append((n - elements) * (took - seconds) / took**2)
            below.append(((n - elements) / took) ** 2)
    most = min(_MOST * took / n for group in by_flops.values() for n, took in group)
    slope = fsum(above) / fsum(below) if fsum(below) else 0.0
    return min(max(0.0, slope), most)
