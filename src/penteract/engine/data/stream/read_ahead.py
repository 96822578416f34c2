"""A thread that makes what will be asked for next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Generic, TypeVar

from penteract.errors import Bug

T = TypeVar("T")
STOP_S = 2.0  # until a thread that may wait for the network is left to itself
_LOOK_S = 0.5  # between two looks of a thread without room at whether it is to stop

_Made = tuple[T | None, BaseException | None]


class ReadAhead(Generic[T]):
    """The items of an endless iterator, up to `depth` of them before they are asked for.

    `make(stopped)` gives the iterator, which should end once `stopped()`. It runs in a thread of its own, which stops
    when this is closed or no longer used.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[T]], depth: int) -> None:
        self._ready, self._room, self._stop = SimpleQueue[_Made[T]](), Semaphore(depth), Event()
        about = make, self._ready, self._room, self._stop
        self.thread = Thread(target=_fill, args=about, name="read-ahead", daemon=True)
        self.thread.start()
        weakref.finalize(self, self._stop.set)  # no more: it may run in that thread, wherever that is

    def take(self) -> T:
        """The next item; raises what making it raised, after which there are no more."""
        item, error = self._ready.get()
        self._room.release()
        if error is not None:
            self.close()
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """Stop, and wait for that unless it takes long."""
        self._stop.set()
        self._room.release()
        self.thread.join(STOP_S)


def _fill(
    make: Callable[[Callable[[], bool]], Iterator[T]], ready: SimpleQueue[_Made[T]], room: Semaphore, stop: Event
) -> None:
    try:
        for item in make(stop.is_set):
            while not room.acquire(timeout=_LOOK_S) and not stop.is_set():
                pass
            if stop.is_set():
                return
            ready.put((item, None))
            del item  # it may be large
        ready.put((None, Bug("STREAM", "an endless stream has ended")))
    except BaseException as e:  # whoever takes the item gets it
        ready.put((None, e))
