"""Two things at once as a run starts: what mostly waits for other threads, files or a device, and Python code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

# How long a thread keeps the interpreter while another wants it. Looking for data and filling weights are thousands of
# short calls, each of which gives the interpreter away: by default each would wait 5 ms to have it back from a thread
# that runs Python code.
SWITCH_S = 1e-5


class _ShortSwitchInterval:
    """The interpreter changes hands sooner while any of several bodies lasts, in whatever order they end."""

    def __init__(self) -> None:
        self.lock, self.bodies, self.usual = Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self.lock:
            self.bodies += 1
            if self.bodies == 1:
                self.usual = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_S)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.bodies -= 1
            if not self.bodies:
                sys.setswitchinterval(self.usual)


short_switch_interval = _ShortSwitchInterval()


@contextmanager
def concurrently(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread during the body. Both have ended after it; an error of the body is raised before one of
    `work`."""
    with short_switch_interval, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(work)
        yield
        pending.result()
