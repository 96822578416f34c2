"""Sets of ranks as runs of equal steps, and as texts: groups of thousands of ranks are a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penteract.units import show_whole

_SHOWN = 8  # ranks of a run that are all written
_RUNS = 4  # of a text


def runs_of(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Ascending ranks -> (first, step, count) of each run."""
    found = list[tuple[int, int, int]]()
    for rank in ranks:
        if found:
            first, step, count = found[-1]
            if count == 1:
                found[-1] = first, rank - first, 2
                continue
            if rank == first + step * count:
                found[-1] = first, step, count + 1
                continue
        found.append((rank, 1, 1))
    return found


def flat(runs: Iterable[tuple[int, int, int]]) -> list[int]:
    """Runs as the page's schema has them."""
    return [number for run in runs for number in run]


def ranks_text(runs: Sequence[tuple[int, int, int]]) -> str:
    """Such as "0–7", "0, 8, 16 … 504", "0–3, 8–11 …"."""
    some = ", ".join(map(_run_text, runs[:_RUNS]))
    return f"{some} …" if len(runs) > _RUNS else some


def count_text(count: int) -> str:
    """Such as "8 ranks"."""
    return f"{show_whole(count)} rank{'s' * (count != 1)}"


def _run_text(run: tuple[int, int, int]) -> str:
    first, step, count = run
    last = first + step * (count - 1)
    if count == 1:
        return str(first)
    if step == 1:
        return f"{first}–{last}"
    if count <= _SHOWN:
        return ", ".join(str(first + step * i) for i in range(count))
    return f"{first}, {first + step}, {first + 2 * step} … {last}"
