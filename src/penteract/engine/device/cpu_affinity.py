"""The cores that this process may use, and how ranks of one host share them."""

from __future__ import annotations

import os

from penteract.config import cgroup


def here() -> int:
    """Cores of the machine."""
    return os.cpu_count() or 1


def allowed() -> int:
    """Cores of this process's affinity mask; all cores where the system has no such mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here()


def usable(allowed: int, quota: float | None) -> int:
    """Usable cores: those allowed, but no more than the `quota` of CPU time that control groups grant, in cores."""
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def usable_here() -> int:
    """Cores that this process may use at once."""
    return usable(allowed(), cgroup.cores())


def threads_of(ranks: int) -> int:
    """Threads for each of this host's `ranks`, so that there are no more threads than cores."""
    return max(1, usable_here() // ranks)
