"""Objects that the garbage collector does not look at, without walks of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze() -> None:
    """Freeze all that is there. Each session and each search asks whether anything is frozen, which walks all of it:
    longer than a small plan, and than a test of a kernel. From now on the answer is yes, which is all that they ask,
    and none of them unfreezes what it found frozen."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1


@contextmanager
def frozen() -> Iterator[None]:
    """`freeze`, and afterwards all is as before, but for cycles: the next `freeze` would keep them."""
    asked = gc.get_freeze_count
    freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.get_freeze_count = asked
