"""A flat range of a row-major tensor as rectangles: what a shard of a buffer holds, as a checkpoint says it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from penteract.engine.checkpoint.slices import Box, Dims


def rectangles(shape: Dims, begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of a tensor of `shape`, read row by row, as rectangles in that order.

    Each is a flat range itself, so its bytes are copied from one place, and there are no fewer such. With d dims they
    are 2·d - 1 at most: what is left of a row where the range begins, whole rows, what it has of the row where it ends.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = prod(rest)
    first, last = begin // row, (end - 1) // row
    if first == last:
        yield from _in_row(first, rest, begin - first * row, end - first * row)
        return
    whole, after = -(-begin // row), end // row  # rows [whole, after) lie inside
    yield from _in_row(first, rest, begin - first * row, row * (whole - first))
    if whole < after:
        yield (whole, *(0 for _ in rest)), (after - whole, *rest)
    yield from _in_row(after, rest, 0, end - after * row)


def _in_row(index: int, rest: Dims, begin: int, end: int) -> Iterator[Box]:
    for offset, size in rectangles(rest, begin, end):
        yield (index, *offset), (1, *size)
