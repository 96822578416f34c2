"""Python's collector of cycles, kept out of a search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Without the collector: a plan keeps hundreds of thousands of small values and makes no cycles, and the collector
    would look through all of them again and again, for a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
