"""The few file operations of a commit: each is atomic, or leaves something that readers ignore."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penteract.errors import DiskFailure


@contextmanager
def failing(path: Path, doing: str) -> Iterator[None]:
    """OSError inside becomes DiskFailure."""
    try:
        yield
    except OSError as e:
        raise DiskFailure(
            "DISK", f"could not {doing}", where=str(e.filename or path), found=e.strerror or str(e),
            fix="free some space, or choose another --output.folder; the last checkpoint is intact",
        ) from e  # fmt: skip


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """A new file with these bytes, on the disk when this returns; returns its size."""
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        for chunk in chunks:
            left = memoryview(chunk)
            size += left.nbytes
            while left.nbytes:
                left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return size


def replace(path: Path, text: str) -> None:
    """A small file's whole content at once: readers see the old or the new."""
    fresh = path.with_name(f"{path.name}.tmp")
    write(fresh, [text.encode()])
    os.replace(fresh, path)
    sync(path.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a folder, durably. `new` must not exist."""
    os.rename(old, new)
    sync(new.parent)


def sync(folder: Path) -> None:
    """The folder's entries are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(folder: Path) -> None:
    """A folder and all in it; nothing when there is none."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    elif folder.is_symlink() or folder.exists():
        os.unlink(folder)


def free_bytes(folder: Path) -> int:
    """What can still be written there."""
    return shutil.disk_usage(folder).free
