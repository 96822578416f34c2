"""A flat range of a row-major tensor as rectangles: shards are flat ranges, and checkpoints store rectangles."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from penteract.engine.checkpoint.boxes import Box, Dims


def rectangles(shape: Dims, begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of a tensor of `shape`, in row-major order, as rectangles in the same order.

    Each rectangle is contiguous itself, and there are as few of them as possible. With d dims there are at most 2·d -
    1: the rest of the row in which the range begins, whole rows, and the beginning of the row in which it ends.
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
