"""Scales of the gradients of gate and up, from some of their rows.

Their largest value is known only when all of what they are made of has been read, three tensors, which then have to be
read again. But scales that are powers of two round numbers alike, and e5m2 has 30 octaves: a scale that is too large
only takes octaves from the smallest numbers. So the scale comes from every `EVERY`th row, with `MARGIN` above the
largest value there. The cast sees values that are larger; where there are some, all is cast again, by the largest. So
no number is cut off, and below the largest there are always 22 octaves.

Short tensors are read twice: their sample would say little. So are those whose ranks share a scale: they agree on the
largest value of all. Other gradients have one tensor to read, and gain little.
"""

from __future__ import annotations

from penteract.config.layout import Layout
from penteract.config.precision.fp8 import Fp8

EVERY = 64
MARGIN = 64.0
LEAST_ROWS = 64 * EVERY


def samples_gradients(fp8: Fp8, layout: Layout) -> bool:
    """Whether scales of these gradients come from some of their rows, if there are enough."""
    return fp8.kind == "tensorwise" and fp8.gradient == "e5m2" and layout.tp * layout.cp == 1


def is_long(rows: int) -> bool:
    """Whether they are enough for a sample."""
    return rows >= LEAST_ROWS
