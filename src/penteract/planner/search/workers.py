"""Processes that search a share of the families ahead of the process that answers, and send it the values they compute.

A worker is forked off a search before this looks at any family. It runs the same search on its own share, and so
computes what the whole search will need of that, a little before it comes there. It stops where the whole search would:
behind the k-th best that this has found.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from mmap import mmap
from pathlib import Path
from struct import Struct
from time import perf_counter
from typing import Any

from penteract.config import cgroup
from penteract.planner.search.best import Search, four_digits
from penteract.planner.search.progress import Pulse
from penteract.planner.search.shared_values import ComputedHere, Key
from penteract.units import GIB, Seconds

MOST = 7  # more would wait for the process that answers: of each value, it has something to do
EACH = GIB  # of memory: a worker takes about as much as the process that answers, for 512 GPUs half a GiB
FAMILIES = 64  # with fewer, a search ends before a worker has begun
PATIENCE = 2.0  # seconds that a worker may be silent while one of its values is waited for
_LOOK = 0.05  # seconds between two looks whether it has passed the value
_EVERY = 64  # bounds between two looks at what came: a worker stops when its pipe is full
_PIPE = 1 << 20  # bytes
_FILES = 1 << 16  # more than a process has open
_LENGTH = Struct("<I")
_ENDED: list[int] = []  # workers whose end is not collected yet


def room() -> int:
    """How many workers this process may have: one for each core on which nothing runs, within the cores and the memory
    that its control groups leave it. Where no core is free, a worker would only be waited for. Forking is safe with one
    thread only. None where /proc does not say."""
    if sys.platform != "linux":
        return 0
    with suppress(OSError):
        if len(os.listdir("/proc/self/task")) == 1:
            running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])  # on all cores; this one, too
            idle, own = (os.cpu_count() or 1) - running, len(os.sched_getaffinity(0)) - 1
            quota, memory = cgroup.cores(), cgroup.memory_left()
            granted = MOST if quota is None else int(quota) - 1
            held = MOST if memory is None else memory // EACH
            return max(0, min(idle, own, granted, held, MOST))
    return 0


@contextmanager
def looking_ahead(search: Search, k: int, number: int | None = None) -> Generator[None]:
    """Let workers look ahead of a search for the `k` best. `number`: how many; by default as many as pay."""
    if number is None:
        number = room() if len(search.frontier.branches) >= FAMILIES else 0
    if number < 1 or not hasattr(os, "fork"):
        yield
        return
    theirs = Workers(number)
    try:
        theirs.start(search, k)
        search.use(theirs)
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

    def sends(self, within: Seconds) -> bool:
        """Whether it sends something or ends within this time."""
        poll = select.poll()  # `select` refuses the pipe of a process with a thousand open files
        poll.register(self.pipe, select.POLLIN)
        return bool(poll.poll(1000 * within))


class Workers:
    """The workers of one search, as the source of its values."""

    def __init__(self, number: int) -> None:
        """`number` of them are to be started."""
        self.pids: list[int] = []
        self.used = 0  # values that came from workers
        self._values: dict[Key, Any] = {}
        self._workers: dict[int, _Worker] = {}
        self._bound, self._bounds = 0.0, 0
        # Seen by all: what the k-th best takes, and the bound at which each worker is.
        self._seen = memoryview(mmap(-1, 8 * (number + 1))).cast("d")
        self._seen[0] = inf

    def start(self, search: Search, k: int) -> None:
        """Deal the families out, and start the workers of the shares from 1 on: as many as the system lets start."""
        _collect()
        search.frontier.deal(len(self._seen))
        with suppress(OSError):  # too many processes or open files, or no memory
            for share in range(1, len(self._seen)):
                with _undisturbed():
                    self._start(search, k, share)

    def _start(self, search: Search, k: int, share: int) -> None:
        pipe, end = os.pipe()
        try:
            if not (pid := os.fork()):
                try:
                    _settle(end)
                    _look_ahead(search, k, share, _Sender(end, self._seen, share))
                finally:
                    os._exit(0)
        except OSError:
            os.close(pipe)
            raise
        finally:
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
            elif not worker.sends(_LOOK) and perf_counter() - since > PATIENCE:
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
        with _undisturbed():
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
        with _undisturbed():
            del self._workers[worker.share]
            os.close(worker.pipe)
            if not _ended(worker.pid):
                os.kill(worker.pid, signal.SIGKILL)
                _ENDED.append(worker.pid)


def _ended(pid: int) -> bool:
    """Whether a worker has ended. Then it is collected: here, or by a program that collects all its processes."""
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _collect() -> None:
    """Forget processes that have ended. That takes some milliseconds, for which a search does not wait."""
    _ENDED[:] = [pid for pid in _ENDED if not _ended(pid)]


@atexit.register
def _collect_all() -> None:
    """At the end of the program: the first process of a container may never collect what is left to it."""
    for pid in _ENDED:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # it was killed


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let signals wait: what a handler raises, such as KeyboardInterrupt, would leave a worker that nobody ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle(pipe: int) -> None:
    """Leave all but `pipe` to the process that answers. Signals are for that, too: they stay blocked. If memory runs
    out, the system ends a worker, which is only missed."""
    os.closerange(0, pipe)
    os.closerange(pipe + 1, _FILES)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


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
        return four_digits(bound) <= self._seen[0]


def _look_ahead(search: Search, k: int, share: int, sender: _Sender) -> None:
    """What a worker does. It ends quietly when nobody reads what it sends."""
    search.frontier.keep(share)
    search.pulse = Pulse()
    search.use(sender)
    with suppress(BrokenPipeError):
        search.best(k)
        sender.reached(inf, inf)
