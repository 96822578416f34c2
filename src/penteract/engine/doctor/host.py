"""The host: system, Python, cores, memory."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.engine.doctor.finding import Finding, count
from penteract.engine.doctor.machine import Host, HostReport
from penteract.units import GIB, Bytes, show_bytes

AREA = "host"
LEAST_SHM: Bytes = GIB  # NCCL's troubleshooting page recommends this much for containers
LEAST_MEMORY: Bytes = 2 * GIB  # for one rank's torch and a small model


def findings(machine: HostReport) -> Iterator[Finding]:
    """Cores, memory and shared memory of the host."""
    host = machine.host
    yield Finding(AREA, f"{host.system}, Python {host.python}")
    yield _cores(host)
    yield _memory(host)
    if found := _shm(host, len(machine.gpus.devices)):
        yield found
    if host.loopback:
        yield Finding(
            AREA, f"no connection on 127.0.0.1 ({host.loopback}): ranks cannot meet", "bad", "ip link set lo up"
        )


def _cores(host: Host) -> Finding:
    what = f"{count(host.usable, 'core')} usable"
    less: list[str] = []
    if host.allowed < host.cores:
        less.append(f"this process may run on {host.allowed}")
    if host.quota is not None and host.quota < host.allowed:
        less.append(f"its control group grants the time of {host.quota:g}")
    if not less:
        return Finding(AREA, what)
    return Finding(AREA, f"{what} of the {host.cores} here: {', '.join(less)}", "note")


def _memory(host: Host) -> Finding:
    if host.memory is None:
        return Finding(AREA, "not known: how much memory there is (no /proc/meminfo here)", "note")
    total = min(host.memory, host.memory_limit or host.memory)
    what = f"{show_bytes(total)} of memory"
    if host.memory_limit is not None and host.memory_limit < host.memory:
        what += f" by its control group's limit, of {show_bytes(host.memory)} here"
    free = None if host.available is None else min(host.available, total)
    if free is None:
        return Finding(AREA, what)
    what += f", {show_bytes(free)} free"
    if free < LEAST_MEMORY:
        return Finding(AREA, what, "warn", "end other processes: ps aux --sort=-rss | head")
    return Finding(AREA, what)


def _shm(host: Host, gpus: int) -> Finding | None:
    """Shared memory: ranks on GPUs of one host without peer access communicate through it."""
    if host.shm is None:
        return None
    what = f"/dev/shm holds {show_bytes(host.shm)}"
    if host.shm >= LEAST_SHM:
        return Finding(AREA, what)
    fix = "mount -o remount,size=8g /dev/shm, or start the container with --shm-size 8g"
    if gpus > 1:
        return Finding(
            AREA, f"{what}: NCCL asks for {show_bytes(LEAST_SHM)} and fails at its first collective", "warn", fix
        )
    return Finding(AREA, f"{what}: too little for NCCL between GPUs; ranks on the CPU do not use it", "note", fix)
