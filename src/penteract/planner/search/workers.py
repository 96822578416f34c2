"""Processes that search a share of the families ahead of the process that answers, and send it the values they compute.

A worker is forked off a search before this looks at any family. It runs the same search on its own share, and so
computes what the whole search will need of that, a little before it comes there. It stops where the whole search would:
behind the k-th best that this has found.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from mmap import mmap
from select import select
from struct import Struct
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penteract.planner.search.progress import Pulse
from penteract.planner.search.shared_values import ComputedHere, Key
from penteract.units import Seconds

if TYPE_CHECKING:
    from penteract.planner.search.best import Search

MOST = 7  # more would wait for the process that answers: of each value, it has something to do
FAMILIES = 64  # with fewer, a search ends before a worker has begun
PATIENCE = 2.0  # seconds that a worker may be silent while one of its values is waited for
_LOOK = 0.05  # seconds between two looks whether it has passed the value
_EVERY = 64  # bounds between two looks at what came: a worker stops when its pipe is full
_PIPE = 1 << 20  # bytes
_LENGTH = Struct("<I")
_ENDED: list[int] = []  # workers whose end is not collected yet


def room() -> int:
    """How many workers this process may have: one for each core on which nothing runs. Where there is none, a worker
    would only be waited for. Forking is safe with one thread only."""
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return 0
    with open("/proc/loadavg", encoding="ascii") as file:
        running = int(file.read().split()[3].partition("/")[0])  # on all cores, this process too
    return max(0, min(len(os.sched_getaffinity(0)) - 1, (os.cpu_count() or 1) - running, MOST))


@contextmanager
def looking_ahead(search: Search, k: int, number: int | None = None) -> Generator[None]:
    """Let workers look ahead of a search for the `k` best. `number`: how many; by default as many as pay."""
    if number is None:
        number = room() if len(search.frontier.branches) >= FAMILIES else 0
    if not number:
        yield
        return
    theirs = Workers(search, k, number)
    search.use(theirs)
    try:
        yield
    finally:
        theirs.close()
        search.use(ComputedHere())  # other questions to this search


@dataclass(slots=True, eq=False)
class _Worker:
    """`pipe`: the end that is read; `received`: the beginning of a message."""

    share: int
    pid: int
    pipe: int
    received: bytes = b""


class Workers:
    """The workers of one search, as the source of its values."""

    def __init__(self, search: Search, k: int, number: int) -> None:
        """Deal the families out, and start the workers of the shares from 1 on."""
        _collect()
        self.pids: list[int] = []
        self.used = 0  # values that came from workers
        self._values: dict[Key, Any] = {}
        self._workers: dict[int, _Worker] = {}
        self._bound, self._bounds = 0.0, 0
        # Seen by all: what the k-th best takes, and the bound at which each worker is.
        self._seen = memoryview(mmap(-1, 8 * (number + 1))).cast("d")
        self._seen[0] = inf
        search.frontier.deal(number + 1)
        for share in range(1, number + 1):
            self._start(search, k, share)

    def _start(self, search: Search, k: int, share: int) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that answers
                for other in (pipe, *[worker.pipe for worker in self._workers.values()]):
                    os.close(other)
                _look_ahead(search, k, share, _Sender(end, self._seen, share))
            finally:
                os._exit(0)
        os.close(end)
        os.set_blocking(pipe, False)
        self.pids.append(pid)
        self._workers[share] = _Worker(share, pid, pipe)

    def computed(self, key: Key, share: int) -> Any:
        """The value of a worker. If it has not come to it yet, wait; if it does not need it or is gone, None."""
        if not share:
            return None
        found = self._values.pop(key, None)
        since = perf_counter() if found is None else 0.0
        while found is None and (worker := self._workers.get(share)):
            passed = self._seen[share] > self._bound  # then all that it needed up to here is sent
            came = self._receive(worker)
            found = self._values.pop(key, None)
            if came:
                since = perf_counter()
            elif passed or share not in self._workers:
                break
            elif not select([worker.pipe], [], [], _LOOK)[0] and perf_counter() - since > PATIENCE:
                self._end(worker)
        self.used += found is not None
        return found

    def put(self, key: Key, value: Any) -> None:
        """What is computed here, no worker needs."""

    def reached(self, bound: Seconds, last: Seconds) -> bool:
        """Let workers know, and look what they sent."""
        self._bound, self._seen[0] = bound, last
        self._bounds += 1
        if self._bounds % _EVERY == 0:
            for worker in [*self._workers.values()]:
                self._receive(worker)
        return True

    def close(self) -> None:
        """End all workers."""
        for worker in [*self._workers.values()]:
            self._end(worker)

    def _receive(self, worker: _Worker) -> bool:
        """Take what a worker has sent; whether there was anything."""
        try:
            data = os.read(worker.pipe, _PIPE)
        except BlockingIOError:
            return False
        if not data:
            self._end(worker)
            return False
        buffer, at = worker.received + data, 0
        while len(buffer) >= (begin := at + _LENGTH.size):
            end = begin + _LENGTH.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            self._values.update(pickle.loads(buffer[begin:end]))
            at = end
        worker.received = buffer[at:]
        return True

    def _end(self, worker: _Worker) -> None:
        del self._workers[worker.share]
        os.close(worker.pipe)
        os.kill(worker.pid, signal.SIGKILL)
        _ENDED.append(worker.pid)


def _collect() -> None:
    """Forget processes that have ended. That takes some milliseconds, for which a search does not wait."""
    _ENDED[:] = [pid for pid in _ENDED if os.waitpid(pid, os.WNOHANG) == (0, 0)]


class _Sender:
    """The values of a worker's search: it computes all of its share, and sends them."""

    def __init__(self, pipe: int, seen: memoryview[float], share: int) -> None:
        self._pipe, self._seen, self._share = pipe, seen, share
        self._unsent: list[tuple[Key, Any]] = []

    def computed(self, key: Key, share: int) -> Any:
        """None: it computes."""
        return None

    def put(self, key: Key, value: Any) -> None:
        """Keep it for the next message."""
        self._unsent.append((key, value))

    def reached(self, bound: Seconds, last: Seconds) -> bool:
        """Send all values, and only then say so. The whole search needs nothing behind its own k-th best."""
        if self._unsent:
            data = pickle.dumps(self._unsent, pickle.HIGHEST_PROTOCOL)
            data = _LENGTH.pack(len(data)) + data
            while data:
                data = data[os.write(self._pipe, data) :]
            self._unsent.clear()
        self._seen[self._share] = bound
        return bound <= self._seen[0]


def _look_ahead(search: Search, k: int, share: int, sender: _Sender) -> None:
    """What a worker does. It ends quietly when nobody reads what it sends."""
    search.frontier.keep(share)
    search.pulse = Pulse()
    search.use(sender)
    with suppress(BrokenPipeError):
        search.best(k)
        sender.reached(inf, inf)
