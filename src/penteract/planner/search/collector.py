"""Python's collector of cycles, kept out of a search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Without the collector: a plan keeps hundreds of thousands of small values and makes no cycles, and the collector
    would look through all of them again and again, for a third of the time. Afterwards they count as old: it need not
    look through all of them at once, either."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()
