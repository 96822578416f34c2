"""A finding: a fact about a machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`what`: the fact, in `area`; `fix`: a command or a change, empty if nothing is to be done.

    ok    as it should be
    note  worth knowing; also what could not be found out, and what would find it out
    warn  a run starts, but will be slower, limited, or may end early
    bad   a run cannot start, cannot be saved, or cannot use the devices that are here; or a device is broken
    """

    area: str
    what: str
    state: State = "ok"
    fix: str = ""


def count(n: int, noun: str, nouns: str = "") -> str:
    """A number with its noun: 3 GPUs, 1 GPU."""
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"


def numbered(indices: Iterable[int]) -> str:
    """Indices as text, with consecutive ones together: 0-2, 5."""
    runs: list[list[int]] = []
    for i in sorted(indices):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
