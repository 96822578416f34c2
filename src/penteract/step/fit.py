"""First-fit allocation: an offset for each of several lifetimes, the lowest gap that fits at its birth."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Any, TypeVar

from penteract.units import Bytes

T = TypeVar("T", int, tuple[Any, ...])  # a time: any ordered type


def first_fit(lives: Iterable[tuple[T, T, Bytes]]) -> tuple[Bytes, list[Bytes]]:
    """lives: (born, dies, bytes), in the order of birth -> (bytes in all, the offset of each)."""
    where: list[Bytes] = []
    placed: list[tuple[Bytes, Bytes, T]] = []  # (begin, end, when it dies), ascending
    size = 0
    for born, dies, n in lives:
        placed = [t for t in placed if t[2] >= born]
        begin = 0
        for low, high, _ in placed:
            if low - begin >= n:
                break
            begin = high
        insort(placed, (begin, begin + n, dies))
        where.append(begin)
        size = max(size, begin + n)
    return size, where
