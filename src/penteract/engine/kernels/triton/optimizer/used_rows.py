"""Which tiles of a gradient are of rows that no token used (`step/clear_rows.py`): those are zero, and are not read."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.kernels.triton.bits import wide
from penteract.step.clear_rows import ClearRows


def table(rows: ClearRows | None, tile: int) -> tuple[int, int, int]:
    """Begin, end and width of a table, for `is_used` on tiles of so many elements; zeros where they are of several
    rows."""
    return (rows.begin, rows.end, rows.width) if rows is not None and rows.tiled(tile) else (0, 0, 0)


@triton.jit
def is_used(gradient, start, begin, end, WIDTH: tl.constexpr):
    """Whether the row that element `start` is of is in use; what is outside of the table is."""
    first = begin + (start - begin) // WIDTH * WIDTH
    return marked(tl.load(gradient + first, (start >= begin) & (start < end), other=1.0))


@triton.jit
def marked(first):
    """Whether a row's first number is anything but +0.0."""
    return wide(first).to(tl.int32, bitcast=True) != 0
