"""Switch Python's garbage collector off during a search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Switch the garbage collector off. A plan keeps hundreds of thousands of small values without cycles; scanning
    them again and again would take a third of the time. Afterwards they are moved to the oldest generation, so that
    they are not scanned at once, either."""
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
