"""The host as the operating system reports it: cores, memory, limits, interfaces."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from pathlib import Path

from penteract.config import cgroup
from penteract.engine.device import cpu_affinity as cores
from penteract.engine.doctor.machine import Host, ProcessLimits
from penteract.units import KIB, Bytes


def host() -> Host:
    """Cores, memory and shared memory of the host, and limits of control groups."""
    memory = _meminfo()
    return Host(
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        python=f"{platform.python_version()} ({sys.executable})",
        cores=cores.here(),
        allowed=cores.allowed(),
        quota=cgroup.cores(),
        memory=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        memory_limit=cgroup.memory(),
        shm=_shm(),
        loopback=_loopback(),
    )


def limits() -> ProcessLimits:
    """Limits of this process; none on systems without POSIX."""
    try:
        import resource
    except ImportError:
        return ProcessLimits()

    def of(name: str) -> tuple[int, int] | None:
        if not hasattr(resource, name):
            return None
        soft, hard = resource.getrlimit(getattr(resource, name))
        return tuple(-1 if n == resource.RLIM_INFINITY else n for n in (soft, hard))  # type: ignore[return-value]

    return ProcessLimits(
        nofile=of("RLIMIT_NOFILE"), memlock=of("RLIMIT_MEMLOCK"), nproc=of("RLIMIT_NPROC"), tasks=cgroup.tasks()
    )


def interfaces() -> tuple[str, ...]:
    """Names of the network interfaces; none where the system cannot list them."""
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:
        return ()


def _meminfo() -> dict[str, Bytes]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(size.split()[0]) * KIB for name, _, size in (line.partition(":") for line in lines)}


def _shm() -> Bytes | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _loopback() -> str:
    """Why one socket of this host cannot connect to another; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=2.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
