"""Files that others wrote, read without waiting and without end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def read_regular(path: Path, *, largest: int) -> bytes:
    """The content of a regular file of at most `largest` bytes. Raises OSError for anything else."""
    with opened_regular(path, largest=largest) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        return file.read(min(largest, os.fstat(fd).st_size))  # it allocates what it is asked for


@contextmanager
def opened_regular(path: Path, *, largest: int) -> Generator[int]:
    """The descriptor of a regular file of at most `largest` bytes. Raises OSError for anything else.

    A pipe would be waited for without end, and a device has none.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > largest:
            raise OSError(errno.EFBIG, f"larger than {largest} bytes", str(path))
        yield fd
    finally:
        os.close(fd)
