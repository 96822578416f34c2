"""Memory of the host that is free."""

from __future__ import annotations

from pathlib import Path

from penteract.engine.device import cgroup
from penteract.units import KIB, Bytes

MEMINFO = Path("/proc/meminfo")


def available() -> Bytes | None:
    """Bytes that Linux reports as available, at most what this process's control groups leave; None if it does
    not tell."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable:")), None)
    limit = cgroup.memory_left()
    return free if limit is None or free is None else min(free, limit)
