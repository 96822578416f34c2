"""What a training process does when it is asked to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 all ask for it.

Python runs a signal's handler in the main thread, between two of its own instructions: never while that thread waits
in a library's C code. So the handlers here do nothing. Signal numbers also go to a pipe (`signal.set_wakeup_fd`), which
a thread reads. While the program starts, that thread ends the process at once, because there is nothing to save yet.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Self

EXIT_CODE = 75  # of a run that was stopped and can go on; `errors.Preempted` has the same
AGAIN_S = 5.0  # a second signal sooner is the same request: a scheduler sends one to launchers and ranks alike
LAST_S = 2.0  # for last words: a full pipe or a hung disk must not keep the process
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SHOW_CURSOR = b"\x1b[?25h"  # the live table hides it


class Phase(Enum):
    """STARTING: a request ends the process at once. MEASURING: too, as nothing is saved. WORKING: the first waits for a
    step to be saved, the second ends the process at once. LAUNCHING: requests are counted, and passed on to ranks."""

    STARTING = 1
    WORKING = 2
    LAUNCHING = 3
    MEASURING = 4


class Stopping:
    """The requests to stop of one process. Inside the context, its signals are requests, and its phase is STARTING
    until `enter`."""

    def __init__(self) -> None:
        self.phase = Phase.WORKING
        self.requests = 0  # a signal within AGAIN_S of the last request is the same one
        self.signal = 0  # the first; 0: none, but the launcher is gone
        self.where = ""  # the run's folder, for the last line
        self.patience = 60.0  # seconds for a save once the launcher, which held the store, is gone
        self.before_leaving: list[Callable[[], None]] = []  # called by the thread that ends the process
        self._first = 0.0  # when the first request came, by `time.monotonic`
        self._last = 0.0  # when the last came
        self._lock = threading.Lock()  # held while the phase changes, and by the thread that ends the process
        self._held = False
        self._users = 0  # nested contexts
        self._parent = 0  # its end is a request too; 0: it is not watched
        self._before: dict[int, Any] = {}  # signal -> handler
        self._pipe = (-1, -1)
        self._wakeup = -1

    @staticmethod
    def of_process() -> Stopping:
        """The one whose handlers this process has; else a new one."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, Stopping) else Stopping()

    @property
    def asked(self) -> bool:
        """Whether there was a request."""
        return self.requests > 0

    @property
    def signalled_before(self) -> bool:
        """Whether a signal came a second ago or earlier, and not from torchrun: that sends SIGTERM to ranks whenever
        one has failed."""
        return self.signal != 0 and not self.watches_parent and time.monotonic() - self._first > 1

    # ---- the context -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._users += 1
        if self._users == 1:
            self.phase = Phase.STARTING
        if self._users == 1 and threading.current_thread() is threading.main_thread():
            self._install()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # never returns if a request is ending this process
            self._users -= 1
        if self._users == 0 and self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            self._before = {}
            os.close(self._pipe[1])  # ends the thread, which closes the other end

    def _install(self) -> None:
        numbers = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:  # `nohup`: it outlives its terminal
            numbers.remove(int(hangup))
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # The thread comes before the handlers, which would otherwise swallow a signal.
        threading.Thread(target=self._listen, args=[self._pipe[0]], name="stopping", daemon=True).start()
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)
            signal.siginterrupt(number, False)  # C code goes on as if nothing had come

    def _handle(self, number: int, frame: object) -> None:
        """Does nothing: the thread does."""

    # ---- phases ----------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, where: str = "") -> None:
        """Go on to another phase; never returns if a request is ending this process."""
        with self._lock:
            self.phase, self.where = phase, where or self.where

    @property
    def watches_parent(self) -> bool:
        """Whether `watch_parent` was called."""
        return self._parent != 0

    def watch_parent(self) -> None:
        """From now on the end of the process that started this one is a request too."""
        self._parent = os.getppid()

    @contextmanager
    def held(self) -> Generator[None]:
        """Inside this context nothing ends the process: a second request takes effect at its end."""
        with self._lock:
            self._held = True
        try:
            yield
        finally:
            with self._lock:
                self._held = False
                if self._at_once:
                    self._leave()

    # ---- the thread ------------------------------------------------------------------------------------------

    def _listen(self, fd: int) -> None:
        while True:
            ready, _, _ = select.select([fd], [], [], 0.5)
            numbers = os.read(fd, 64) if ready else b""
            if ready and not numbers:
                return os.close(fd)
            for number in numbers:
                self.ask(number)
            if self._parent not in (0, os.getppid()) and not self.asked:
                self.ask(0)

    def ask(self, number: int) -> None:
        """A request to stop, by signal `number`; 0: because the launcher is gone. May end this process."""
        with self._lock:
            now = time.monotonic()
            if self.requests and now - self._last < AGAIN_S:
                return
            self._first = self._first or now
            self.requests, self._last, self.signal = self.requests + 1, now, self.signal or number
            if self._at_once and not self._held:
                self._leave()

    @property
    def _at_once(self) -> bool:
        if self.phase in (Phase.STARTING, Phase.MEASURING):
            return self.asked
        return self.phase is Phase.WORKING and self.requests > 1

    def _leave(self) -> None:
        """End this process. Its caller holds the lock, so that the main thread cannot begin to train or to save."""
        words = threading.Thread(target=self._last_words, daemon=True)
        words.start()
        words.join(LAST_S)
        os._exit(EXIT_CODE)

    def _last_words(self) -> None:
        # The main thread may be inside of `sys.stderr`, and hold its lock.
        with suppress(OSError):
            os.write(2, f"{self.line()}\n".encode())
        for do in self.before_leaving:
            with suppress(Exception):
                do()
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)

    def line(self) -> str:
        """What is printed when a request ends this process at once."""
        where = f" · {self.where}" * bool(self.where)
        if self.phase is Phase.STARTING:
            return f"error[STOPPED]: stopped before the first step{where} · fix: start it again"
        if self.phase is Phase.MEASURING:
            return f"error[STOPPED]: stopped before all was measured{where} · fix: start it again, into another folder"
        return (
            f"error[STOPPED]: stopped at once: steps after the last checkpoint are lost{where} · "
            f"fix: penteract train --resume {self.where or 'latest'}"
        )
