"""Stretches of time that follow each other, with those joined that are too short to be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def joined(parts: Iterable[tuple[int, int]], least: int) -> list[int]:
    """What and how long, for each stretch of `parts`: what, how long, what, how long, … Those shorter than `least` are
    joined until they are as long, under what has the most of it. Nothing of the time is lost."""
    found, short = list[int](), Counter[int]()

    def flush() -> None:
        if short:
            found.extend((max(short, key=short.__getitem__), short.total()))
            short.clear()

    for what, length in parts:
        if length >= least:
            flush()
            found.extend((what, length))
            continue
        short[what] += length
        if short.total() >= least:
            flush()
    flush()
    return found
