"""Two things at once as a run starts: what mostly waits for other threads or a device, and Python code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# How long a thread keeps the interpreter while another wants it. Filling weights are thousands of short calls, each of
# which gives the interpreter away: by default each would wait 5 ms to have it back from a thread that runs Python code.
SWITCH_S = 1e-5


@contextmanager
def concurrently(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread during the body. Both have ended after it; an error of the body is raised before one of
    `work`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(work)
            yield
            pending.result()
    finally:
        sys.setswitchinterval(before)
