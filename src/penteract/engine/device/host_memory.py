"""How much memory of the host this process may still take."""

from __future__ import annotations

from pathlib import Path

from penteract.config import cgroup
from penteract.units import KIB, Bytes

MEMINFO = Path("/proc/meminfo")


def available() -> Bytes | None:
    """Bytes that can be allocated without swapping (MemAvailable of Linux), or what the limits of this process's
    cgroups leave, if that is less. None where /proc/meminfo does not exist or lacks it."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable:")), None)
    left = cgroup.memory_left()
    return free if left is None or free is None else min(free, left)
