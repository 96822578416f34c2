"""The file operations of a commit: each is atomic, or leaves files that readers ignore."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penteract.errors import DiskFailure

LARGE = 2**28  # bytes of a file that is synced while it is written
_PAUSE_S = 0.02  # between two syncs of it: the kernel has then taken some parts


_FIX = "free some space, or choose another --checkpoint.folder; the last checkpoint is intact"


@contextmanager
def failing(path: Path, doing: str, *, fix: str = _FIX) -> Iterator[None]:
    """Turn an OSError inside the context into DiskFailure. `fix`: where it is not a run that writes; contexts inside
    this one have it too."""
    try:
        yield
    except DiskFailure as e:
        if e.fix != _FIX:
            raise
        raise DiskFailure(e.code, e.what, where=e.where, found=e.found, allowed=e.allowed, fix=fix) from e
    except OSError as e:
        raise DiskFailure(
            "DISK", f"could not {doing}", where=str(e.filename or path), found=e.strerror or str(e),
            fix=fix,
        ) from e  # fmt: skip


def write(path: Path, chunks: Iterable[bytes | memoryview], *, reserve: int = 0) -> int:
    """Write a new file and sync it to the disk; returns its size. `reserve`: bytes of the disk that are taken before
    anything is written: free space says nothing of quotas, nor of what others write meanwhile."""
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        if reserve:
            _reserve(fd, reserve)
        for chunk in chunks:
            left = memoryview(chunk)
            size += left.nbytes
            while left.nbytes:
                left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return size


class Part(NamedTuple):
    """Bytes of a file from offset `at` on."""

    at: int
    chunks: Iterable[bytes | memoryview]


def write_parts(path: Path, parts: Sequence[Part], size: int, *, threads: int = 1) -> int:
    """Write a file of `size` bytes, which are taken first, from parts that do not meet, and sync it; returns its size.
    It is new or `reserve`d. Each of the `threads` writes whole parts: hashing and writing let the others run. A large
    file is synced while it is written, so that the disk is not idle until the last byte is there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    failed = threading.Event()

    def write(part: Part) -> None:
        at = part.at
        for chunk in part.chunks:
            left = memoryview(chunk)
            while left.nbytes and not failed.is_set():
                done = os.pwritev(fd, [left], at)
                left, at = left[done:], at + done

    def noting(part: Part) -> None:
        try:
            write(part)
        except BaseException:
            failed.set()
            raise

    try:
        _reserve(fd, size)
        with _synced_meanwhile(fd, failed) if size >= LARGE else contextlib.nullcontext():
            if threads == 1:
                for part in parts:
                    write(part)
            else:
                with ThreadPoolExecutor(threads, "save") as pool:
                    for done in [pool.submit(noting, part) for part in parts]:
                        done.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return size


@contextmanager
def _synced_meanwhile(fd: int, failed: threading.Event) -> Iterator[None]:
    """Sync what has been written of a file again and again. An error of the disk is told only once to each descriptor,
    so that of this thread sets `failed`, and is raised at the end. Raises OSError."""
    ended, errors = threading.Event(), list[OSError]()
    sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync

    def sync() -> None:
        while not errors and not ended.wait(_PAUSE_S):
            try:
                sync_data(fd)
            except OSError as e:
                errors.append(e)
                failed.set()

    thread = threading.Thread(target=sync, name="sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def reserve(path: Path, size: int) -> int:
    """Make a new file of `size` bytes, which are taken; returns its size."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        _reserve(fd, size)
    finally:
        os.close(fd)
    return size


def _reserve(fd: int, size: int) -> None:
    """Take `size` bytes of the disk. A file system that cannot reserve is left to fail when it is written."""
    with contextlib.suppress(AttributeError):  # macOS has none
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def replace(path: Path, text: str) -> None:
    """Replace a small file atomically: readers see the old or the new content."""
    fresh = path.with_name(f"{path.name}.tmp")
    write(fresh, [text.encode()])
    os.replace(fresh, path)
    sync(path.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a folder, and sync its parent. `new` must not exist."""
    os.rename(old, new)
    sync(new.parent)


def sync(folder: Path) -> None:
    """Sync the folder's entries to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(folder: Path) -> None:
    """Remove a folder with its content, if it exists."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    elif folder.is_symlink() or folder.exists():
        os.unlink(folder)


class Room(NamedTuple):
    """What is free on the file system of a folder. `files`: None if it does not limit them."""

    bytes: int
    files: int | None


def room(folder: Path) -> Room:
    """The room on the file system that holds the folder, or the nearest existing one above it."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)
