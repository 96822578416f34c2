"""Printing that cannot fail: a run goes on when its terminal or the reader of its output is gone. Other commands end
with one line."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from penteract.errors import DiskFailure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_WAIT_S = 5.0  # for the reader of a pipe that does not block its writer


class _NeverFails(io.RawIOBase):
    """Writes to a file descriptor. What cannot be written is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: ReadableBuffer, /) -> int:
        """Returns the length of `data`, written or not."""
        left = memoryview(data).cast("B")
        length = left.nbytes
        try:
            while left.nbytes:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    if not select.select([], [self._fd], [], _WAIT_S)[1]:
                        break
        except OSError as error:
            self.failed(error)
        return length

    def failed(self, error: OSError) -> None:
        """What cannot be written is dropped."""

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal's."""
        return os.isatty(self._fd)


class _FailsOnce(_NeverFails):
    """The first failure is raised; then all is dropped, so that what ends the process does not fail as well."""

    _has_failed = False

    def failed(self, error: OSError) -> None:
        """Raises DiskFailure, or the error itself where a pipe has no reader any more."""
        if self._has_failed:
            return
        self._has_failed = True
        if isinstance(error, BrokenPipeError):
            raise error
        raise DiskFailure("DISK", "what is printed cannot be written", where="standard output", found=error.strerror,
                          fix="print elsewhere, or make room there") from None  # fmt: skip


@contextmanager
def never_fails() -> Generator[None]:
    """Inside this context, nothing that is printed raises: not on a closed pipe, a full disk, or an encoding that lacks
    a letter."""
    with _instead(*(_over(stream, _NeverFails, careful=True) for stream in (sys.stdout, sys.stderr))):
        yield


@contextmanager
def fails_once() -> Generator[None]:
    """Inside this context, output that cannot be written raises one DiskFailure, and errors that cannot be printed
    nothing: the exit code tells of them."""
    with _instead(_over(sys.stdout, _FailsOnce), _over(sys.stderr, _NeverFails, careful=True)):
        yield


@contextmanager
def _instead(out: TextIO, err: TextIO) -> Generator[None]:
    """Print to these streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError, DiskFailure):
                stream.flush()
        sys.stdout, sys.stderr = before


def _over(stream: TextIO, raw: type[_NeverFails], *, careful: bool = False) -> TextIO:
    """A stream over the descriptor of `stream`; `stream` itself if it has none, as a test's has not. `careful`: each
    line is written at once, and a letter that the encoding lacks does not fail."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    with suppress(OSError):
        stream.flush()
    bare = io.BufferedWriter(raw(fd))
    if careful:
        return io.TextIOWrapper(bare, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
    return io.TextIOWrapper(
        bare, encoding=stream.encoding, errors=stream.errors, line_buffering=bool(stream.line_buffering)
    )
