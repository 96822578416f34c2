"""Printing that cannot fail: a run goes on when its terminal or the reader of its output is gone."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

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
        with suppress(OSError):
            while left.nbytes:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    if not select.select([], [self._fd], [], _WAIT_S)[1]:
                        break
        return length

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal's."""
        return os.isatty(self._fd)


@contextmanager
def never_fails() -> Generator[None]:
    """Inside this context, nothing that is printed raises: not on a closed pipe, a full disk, or an encoding that lacks
    a letter."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_over(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _over(stream: TextIO) -> TextIO:
    """A stream over the descriptor of `stream`; `stream` itself if it has none, as a test's has not."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    with suppress(OSError):
        stream.flush()
    bare = io.BufferedWriter(_NeverFails(fd))
    return io.TextIOWrapper(bare, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
