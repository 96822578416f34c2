"""Seconds of matrix products: a formula of four terms, fitted to measured shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from penteract.config.hardware import Gpu, Shape
from penteract.ops.declarations.declaration import Product
from penteract.units import Seconds

_DEPENDENT = 1e-12  # what is left of a column of length 1 when those before it explain it


@dataclass(frozen=True, slots=True)
class Gemm:
    """Seconds of `times` products [m, k]·[k, n], never less than their memory traffic takes.

    flop      per FLOP (2mnk): the inner products
    result    per result (mn): filling and draining the pipeline of a tile, writing it; matters if k is small
    operand   per operand (mk + kn): reading that is not hidden; matters for narrow products
    start     of a kernel; matters for small products
    byte      seconds per byte of memory traffic
    width     bytes of an element

    All terms grow with the sizes, so no product costs less than a smaller one. Wave quantisation is not included:
    shapes that would fill 1.5 waves of tiles were measured at the rate of full ones, as libraries change tiles or split
    the inner dimension.
    """

    flop: float
    result: float
    operand: float
    start: float
    byte: float
    width: int

    def __call__(self, p: Product) -> Seconds:
        """Seconds of a product: the start of a kernel, then the longer of its arithmetic and its memory traffic."""
        times, m, n, k = p
        results, operands = times * m * n, times * k * (m + n)
        compute = self.flop * 2 * k * results + self.result * results + self.operand * operands
        memory = self.byte * self.width * (operands + results)
        return self.start + (compute if compute > memory else memory)

    @staticmethod
    def of(shapes: Sequence[Shape], measured: tuple[Gpu, str], wanted: tuple[Gpu, str], hbm: float, width: int) -> Gemm:
        """Fit `shapes`, and scale from the measured device and dtype to the wanted ones by their peaks.

        hbm    bytes/s that products get from the wanted device's memory
        width  bytes of an element
        """
        slower = measured[0].peak(measured[1]) / wanted[0].peak(wanted[1])
        flop, result, operand, start = fit(shapes)
        return Gemm(flop * slower, result * slower, operand * slower, start, 1 / hbm, width)


def terms(shape: Shape) -> tuple[float, float, float, float]:
    """The four terms of a shape: FLOPs, results, operands, one kernel."""
    times, m, n, k, _ = shape
    return 2.0 * times * m * n * k, float(times * m * n), float(times * k * (m + n)), 1.0


def fit(shapes: Sequence[Shape]) -> list[float]:
    """Seconds of each term: least squares of relative errors, with no negative term. Terms that so few or such equal
    shapes do not tell apart are left out, the last first."""
    rows = [terms(shape) for shape in shapes]
    scaled = [[x * shape[4] * 1e12 / row[0] for x in row] for row, shape in zip(rows, shapes, strict=True)]
    law, kept = [0.0] * 4, [0, 1, 2, 3]
    while True:
        found = _least_squares([[row[i] for i in kept] for row in scaled])
        if isinstance(found, int):
            kept.pop(found)
            continue
        if min(found) >= 0:
            for i, seconds in zip(kept, found, strict=True):
                law[i] = seconds
            return law
        kept.pop(found.index(min(found)))


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | int:
    """x with rows·x nearest to 1: normal equations, columns scaled to one, by elimination. Or the first column that is
    a sum of those before it."""
    size = range(len(rows[0]))
    scale = [fsum(row[i] ** 2 for row in rows) ** 0.5 for i in size]
    unit = [[row[i] / scale[i] for i in size] for row in rows]
    a: list[list[float]] = [[*(fsum(r[i] * r[j] for r in unit) for j in size), fsum(r[i] for r in unit)] for i in size]
    for i in size:
        pivot = max(range(i, len(a)), key=lambda r: abs(a[r][i]))
        a[i], a[pivot] = a[pivot], a[i]
        if abs(a[i][i]) < _DEPENDENT:
            return i
        for r in size:
            if r != i:
                factor = a[r][i] / a[i][i]
                a[r] = [x - factor * y for x, y in zip(a[r], a[i], strict=True)]
    return [a[i][-1] / a[i][i] / scale[i] for i in size]
