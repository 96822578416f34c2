"""A thread that makes what will be asked for next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
STOP_S = 2.0  # until a thread that may wait for the network is left to itself


class ReadAhead(Generic[T]):
    """The items of an iterator, up to `depth` of them before they are asked for.

    `make(stopped)` gives the iterator, which should end once `stopped()`. It runs in a thread of its own, which stops
    when this is closed or no longer used, or the process ends.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[T]], depth: int) -> None:
        ready, stop = Queue[tuple[T | None, BaseException | None]](depth), Event()
        self._ready = ready
        thread = Thread(target=_fill, args=(make, ready, stop), name="read-ahead", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, ready, stop, thread)

    def take(self) -> T:
        """The next item; raises what making it raised, after which there are no more."""
        item, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        assert item is not None
        return item


def _fill(
    make: Callable[[Callable[[], bool]], Iterator[T]], ready: Queue[tuple[T | None, BaseException | None]], stop: Event
) -> None:
    try:
        for item in make(stop.is_set):
            ready.put((item, None))
            if stop.is_set():
                return
    except BaseException as e:  # whoever takes the item gets it
        ready.put((None, e))


def _close(ready: Queue[Any], stop: Event, thread: Thread) -> None:
    stop.set()
    with suppress(Empty):
        while True:
            ready.get_nowait()  # it may wait for room
    thread.join(STOP_S)
