"""Collections of garbage between chosen steps.

An automatic collection walks all objects of all libraries, which takes tens of milliseconds, in the middle of a step
that the host has to launch: the device waits. So a run collects after its second step, when everything it keeps is
there, and then every `EVERY` steps, at the same steps on all ranks. What is there after the second step is never walked
again. After the first step it collects too: what imports and compiles in that step leaves cycles of frames, which keep
the tensors of the calls that they were in, and with them memory of the device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # steps
_FIRST = 2  # steps of this process


def imports_are_done() -> None:
    """Collect from now on, where importing began without (`penteract`): what is imported is never walked. Elsewhere
    nothing changes."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """No automatic collections within; afterwards all is as before. Within another such context nothing changes."""
    outer = not gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if not outer:
            gc.enable()


def collect_after(steps: int) -> None:
    """Collect if it is time to. `steps`: how many this process has begun, from 1."""
    if steps <= _FIRST or steps % EVERY == 0:
        gc.collect()
    if steps == _FIRST:
        gc.freeze()
