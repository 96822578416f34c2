"""Cores that this process may keep busy, and how ranks of one host share them."""

from __future__ import annotations

import os

from penteract.engine.doctor.probe import cgroup


def here() -> int:
    """Of the machine."""
    return os.cpu_count() or 1


def allowed() -> int:
    """That this process may run on; all, where the system has no such mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here()


def usable(allowed: int, quota: float | None) -> int:
    """Of those allowed, where control groups grant the time of `quota` cores."""
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def usable_here() -> int:
    """Cores that this process may use at once."""
    return usable(allowed(), cgroup.cores())


def threads_of(ranks: int) -> int:
    """Threads of each of this host's ranks: more threads than cores cost more than they give."""
    return max(1, usable_here() // ranks)
