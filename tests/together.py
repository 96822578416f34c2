"""Cases that wait for limits, all at once: waiting needs no core. A test asks for the outcome of its own case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Outcome = TypeVar("Outcome")


def together(cases: Mapping[str, Callable[[], Outcome]]) -> dict[str, Future[Outcome]]:
    """Each in a thread of its own, to the end of the last. `.result()` raises what its case has raised."""
    with ThreadPoolExecutor(len(cases)) as threads:
        return {name: threads.submit(case) for name, case in cases.items()}
