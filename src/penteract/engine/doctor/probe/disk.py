"""Free space and speed of the disk for runs: a small file is written, flushed and removed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from penteract.engine.doctor.machine import Disk
from penteract.units import MIB

WRITTEN = 64 * MIB
WRITE_BYTES = MIB
LONGEST_S = 0.5  # seconds of writing before the file is flushed
MOUNTS = Path("/proc/self/mounts")


def disk(folder: Path) -> Disk:
    """Examine the disk of `folder`. If the folder does not exist yet, the nearest one above it is used."""
    asked = _nearest(folder.absolute())
    free = total = files = None
    try:
        stats = os.statvfs(asked)
        free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
        files = stats.f_favail if stats.f_files else None  # some file systems have no fixed number
    except (OSError, AttributeError):
        pass
    speed, error = None, _in_the_way(folder.absolute())
    try:
        speed = (
            _write_speed(asked, WRITTEN if free is None or free > 4 * WRITTEN else WRITE_BYTES) if not error else None
        )
    except OSError as e:
        error = e.strerror or str(e)
    return Disk(folder=str(folder), asked=str(asked), free=free, total=total, files=files, kind=_kind(asked),
                speed=speed, error=error)  # fmt: skip


def _nearest(folder: Path) -> Path:
    return next(p for p in (folder, *folder.parents) if p.is_dir())


def _in_the_way(folder: Path) -> str:
    """What keeps the folder from being made, where something else has its name."""
    found = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)
    return "" if found.is_dir() else f"{found} is no folder"


def _write_speed(folder: Path, size: int) -> float | None:
    """Bytes a second with flushing; None if too little was written to measure."""
    data = os.urandom(WRITE_BYTES)  # random, because a disk that compresses would write zeros too fast
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began, done = time.perf_counter(), 0
        while done < size and time.perf_counter() - began < LONGEST_S:
            done += file.write(data)
        os.fsync(file.fileno())
        took = time.perf_counter() - began
    return done / took if size > WRITE_BYTES else None


def _kind(folder: Path) -> str:
    """The file system's type, from the nearest mount above `folder`."""
    try:
        rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    real = os.path.realpath(folder)
    above = [(len(at), kind) for _, at, kind, *_ in rows if at == "/" or real == at or real.startswith(at + "/")]
    return max(above, default=(0, ""))[1]
