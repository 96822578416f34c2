"""Limits of a process that matter for training: open files, locked memory, tasks."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.engine.doctor.finding import Finding, count
from penteract.engine.doctor.machine import HostReport, ProcessLimits
from penteract.engine.rank.open_files import OTHERS, of_agent, of_world
from penteract.units import show_bytes

AREA = "limits"
LEAST_FILES = 4096  # where the number of ranks is not known: enough for 1,300
LEAST_TASKS = 4096  # threads of torch, NCCL and data loading, for several ranks


def findings(machine: HostReport) -> Iterator[Finding]:
    """Limits that are too low for training."""
    limits, many = machine.limits, len(machine.gpus.devices) > 1
    if limits.nofile is not None:
        yield _files(limits.nofile, machine.environment.get("WORLD_SIZE", ""))
    if limits.memlock is not None:
        yield _locked(limits.memlock, bool(machine.ports))
    if found := _tasks(limits, many):
        yield found


def _files(limit: tuple[int, int], world: str) -> Finding:
    """Open files, of `world` ranks where a launcher says how many. A rank raises its soft limit to the hard one."""
    soft, hard = limit
    is_count = len(world) < 10 and world.isascii() and world.isdigit()
    least = of_world(int(world), holds_store=True) + OTHERS if is_count else LEAST_FILES
    what = f"open files: {_shown(soft)}"
    if hard != soft:
        what += f", and a run may raise that to {_shown(hard)}" if hard >= 0 else ", and a run may raise that"
    if hard < 0 or hard >= least:
        agents = f"; torchrun's agent keeps {_shown(soft)}, enough for a store of {count(of_agent(soft), 'rank')}"
        return Finding(AREA, what + (agents if 0 <= soft < least else ""))
    wanted = max(65536, least)
    fix = f"ulimit -n {wanted}, once nofile in /etc/security/limits.conf, or --ulimit nofile={wanted}, allows it"
    enough = (
        f"{count(int(world), 'rank')}, whose first needs {least}" if is_count else f"{LEAST_FILES} sockets and files"
    )
    return Finding(AREA, f"{what}: not enough for {enough}", "warn", fix)


def _locked(limit: tuple[int, int], fabric: bool) -> Finding:
    """Locked memory. Network adapters (RDMA) read and write memory that is locked."""
    soft = limit[0]
    if soft < 0:
        return Finding(AREA, "locked memory: no limit")
    what = f"locked memory: {show_bytes(soft)}"
    fix = "ulimit -l unlimited, or start the container with --ulimit memlock=-1"
    if fabric:
        return Finding(AREA, f"{what}: NCCL over InfiniBand fails with less than no limit", "warn", fix)
    return Finding(AREA, f"{what} (it matters with InfiniBand)")


def _tasks(limits: ProcessLimits, many: bool) -> Finding | None:
    """The lower of the user's limit and the control group's."""
    found = [n for n in (limits.nproc[0] if limits.nproc else -1, limits.tasks) if n is not None and n >= 0]
    if not found or min(found) >= LEAST_TASKS:
        return None
    fix = "ulimit -u unlimited, or start the container with --pids-limit -1"
    return Finding(AREA, f"processes and threads: {count(min(found), 'task')}", "warn" if many else "note", fix)


def _shown(limit: int) -> str:
    return "no limit" if limit < 0 else str(limit)
