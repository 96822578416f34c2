"""Cases sorted into the cells of a heat map: of each cell its best case, how many it has, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_WORDS = {"out of memory": "OOM", "timed out": "time", "done": "void", "skipped": "too big"}  # short, for a cell


@dataclass(frozen=True, slots=True)
class CellCases(Generic[T]):
    """The cases of a cell. `best`: the one with the largest value, else the first; `good`: whether it has a value."""

    best: T
    good: bool
    cases: tuple[T, ...]


def cells(cases: Iterable[T], key: Callable[[T], K], value: Callable[[T], float | None]) -> dict[K, CellCases[T]]:
    """The cells of cases, in the order in which they occur. `value`: more is better; None: it counts for nothing."""
    found = dict[K, list[T]]()
    for case in cases:
        found.setdefault(key(case), []).append(case)
    return {at: _cell(tuple(some), value) for at, some in found.items()}


def _cell(cases: tuple[T, ...], value: Callable[[T], float | None]) -> CellCases[T]:
    most: tuple[float, T] | None = None
    for case in cases:
        if (found := value(case)) is not None and (most is None or found > most[0]):
            most = found, case
    return CellCases(most[1] if most else cases[0], most is not None, cases)


def short_word(state: str) -> str:
    """A state in a word that a cell has room for; of a case that is done and counts for nothing, void."""
    return _WORDS.get(state, state)
