"""A rank's side of the process that writes its checkpoints. Nothing here waits for the disk."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from penteract import errors
from penteract.engine.checkpoint.background.shared_memory import SharedMemory
from penteract.engine.checkpoint.background.writer_process import SIGNALS
from penteract.errors import PenteractError

_MODULE = "penteract.engine.checkpoint.background.writer_process"
_END_S = 10.0  # for a writer to end that has no requests, or was killed


class WriterDied(Exception):
    """The writer's process has ended before it answered, or did not start; its message goes on after "the writer"."""


class Process(Protocol):
    """A process, as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


def spawned(words: Sequence[str], files: Sequence[int]) -> Process:
    """The writer as a process of its own, without what this one has in memory. `files`: those that it gets.

    Requests to stop are for the rank; a scheduler sends them to all processes. So they are blocked before it begins.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=tuple(files),
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(slots=True)
class BackgroundWriter:
    """Starts the writer when it is first asked, and again after it has died.

    `description`: what lies where in the snapshot, as JSON. `spawn(words, files)` starts a process. `asked`: when the
    last request was sent, by `time.monotonic`.
    """

    snapshot: SharedMemory
    description: bytes
    spawn: Callable[[Sequence[str], Sequence[int]], Process] = spawned
    payload: SharedMemory = field(default_factory=lambda: SharedMemory.of_size("requests of a writer"))
    process: Process | None = None
    asked: float = 0.0
    _connection: socket.socket | None = None
    _received: bytes = b""

    def ask(self, do: str, payload: bytes = b"", **about: Any) -> Generator[None, None, str]:
        """Ask for `do`, yield until there is an answer, and return it. Raises what the writer raised, or WriterDied."""
        if self.process is None:
            self._start()
            yield from self._asked("describe", self.description, {})
        return (yield from self._asked(do, payload, about))

    def wait(self, seconds: float) -> None:
        """Wait until there may be an answer, at most so long."""
        answers = select.poll()  # `select` takes no descriptor above 1023, and a rank may have more
        if self._connection is not None:
            answers.register(self._connection, select.POLLIN)
        answers.poll(1000 * seconds)

    def kill(self) -> None:
        """End the writer, whatever it does. The next request starts another."""
        if self.process is not None:
            self.process.kill()
        self._forget()

    def close(self) -> None:
        """End a writer that is not asked for anything any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._forget()

    def _start(self) -> None:
        own, theirs = socket.socketpair()
        own.setblocking(False)
        files = (theirs.fileno(), self.snapshot.fd, self.payload.fd)
        words = (os.getpid(), files[0], files[1], self.snapshot.size, files[2])
        with theirs:
            try:
                self.process = self.spawn([str(word) for word in words], files)
            except OSError as e:  # too many processes, or no memory for one more
                own.close()
                raise WriterDied(f"did not start: {e.strerror}") from e
        self._connection, self._received = own, b""

    def _asked(self, do: str, payload: bytes, about: dict[str, Any]) -> Generator[None, None, str]:
        assert self._connection is not None
        self.payload.put(payload)
        self.asked = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: there will be no answer
            self._connection.sendall(json.dumps({"do": do, "length": len(payload), **about}).encode() + b"\n")
        while (line := self._line()) is None:
            yield
        answer = json.loads(line)
        if "error" in answer:
            raise _error(answer["error"])
        return self.payload.get(int(answer["length"])).decode()

    def _line(self) -> bytes | None:
        """The next line that the writer sent; None if there is none yet. Raises WriterDied."""
        assert self._connection is not None
        while b"\n" not in self._received:
            try:
                more = self._connection.recv(2**16)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                more = b""
            if not more:
                raise WriterDied(self._forget())
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _forget(self) -> str:
        """Forget a writer that has ended; how it did."""
        process, self.process = self.process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return "was not running"
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:  # killed, in a call to a disk that does not answer: it ends after that
            return "does not end"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _error(row: dict[str, Any]) -> PenteractError:
    """An error of the writer, as this process raises it."""
    kind = getattr(errors, row["kind"])
    details = {name: row[name] for name in ("where", "found", "allowed", "fix")}
    return kind(row["code"], row["what"], **details)
