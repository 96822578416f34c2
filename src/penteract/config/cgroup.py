"""Limits of this process's control groups, of both versions. The lowest limit among a group and its ancestors holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NONE = 1 << 60  # version 1 has a number near 2^63 for "no limit"


def cores(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """CPU time in cores; None if there is no limit."""
    found: list[float] = []
    for folder in _folders("cpu", mount, membership):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes; None if there is no limit."""
    return _least("memory", ("memory.max", "memory.limit_in_bytes"), mount, membership)


def memory_left(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process's groups may still take: each limit less what is used of it, without the pages of files
    that the kernel would drop. None if there is no limit."""
    left = list[int]()
    for folder in _folders("memory", mount, membership):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= NONE:
            continue
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
        stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if " " in line)
        dropped = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
        left.append(max(0, limit - max(0, used - int(dropped))))
    return min(left, default=None)


def _first_number(folder: Path, *names: str) -> int | None:
    """The number in the first of these files that has one."""
    return next((int(text) for text in (_read(folder / name) for name in names) if text.isdigit()), None)


def tasks(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Processes and threads; None if there is no limit."""
    return _least("pids", ("pids.max",), mount, membership)


def memory_kills(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Processes of this group that the kernel has killed for memory since the group was made, whoever's limit it was;
    None where nothing counts them, as outside of any group."""
    for folder in _folders("memory", mount, membership):
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(folder / name).splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill" and count.isdigit():
                    return int(count)
    return None


def _least(controller: str, files: tuple[str, ...], mount: Path, membership: Path) -> int | None:
    texts = (_read(folder / name) for folder in _folders(controller, mount, membership) for name in files)
    return min((int(t) for t in texts if t.isdigit() and int(t) < NONE), default=None)


def _folders(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """This process's folder of a controller, and those above it. In a container perhaps only its root exists."""
    for line in _read(membership).splitlines():
        _, names, path = line.split(":", 2)
        if names == "":  # version 2 holds all controllers
            root = mount
        elif controller in names.split(","):
            root = mount / controller
        else:
            continue
        at = root / path.strip("/")
        yield from (folder for folder in (at, *at.parents) if folder == root or root in folder.parents)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
