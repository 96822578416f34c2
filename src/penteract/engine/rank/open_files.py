"""How many files a rank may have open: sockets to other ranks count as files. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress

from penteract.errors import BadInput

try:
    import resource
except ImportError:  # a system without POSIX has no such limits
    resource = None

OTHERS = 128  # besides those of the world: of a layout's groups, of kernels, of data, of checkpoints
_WITHOUT_PROC = 64  # open files of a process that has loaded torch, where nobody can count them
_AGENTS = 64  # of torchrun's agent, besides its store's


def of_world(world: int, *, holds_store: bool) -> int:
    """Files that a rank opens to join and to watch `world` ranks, as they were counted for 2 to 32.

    Gloo's group of the world connects each pair. It has three files and a socket to listen besides; a rank has two
    sockets to the store, of which one is its watcher's. The rank that holds the store has both ends of its own, the
    other end of each rank's, and nine files besides.
    """
    return world + 5 + (_of_store(world) if holds_store else 0)


def allow_files(world: int, rank: int, *, agents_store: bool) -> None:
    """Raise this process's limit as far as it may. Raises BadInput if that is not enough for `world` ranks, of which it
    is `rank`. `agents_store`: torchrun's agent holds the store, with the limit that this process began with."""
    if resource is None:
        return
    began, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _now() + of_world(world, holds_store=rank == 0 and not agents_store) + OTHERS
    enough = began < 0 or began >= need
    for wanted in (hard, *(() if enough else (need,))):  # some systems take no limit that is no number
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    if world == 1:
        return
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= soft < need:
        raise _too_few(world, f"rank {rank}", hard, need, "where ranks are started")
    if rank == 0 and agents_store and 0 <= began < (need := _of_store(world) + _AGENTS):
        raise _too_few(world, "torchrun's agent", began, need, "before torchrun")


def of_agent(soft: int) -> int:
    """Of how many ranks torchrun's agent can hold the store, with this limit, which it does not raise."""
    return max(0, (soft - _AGENTS - _of_store(0)) // (_of_store(1) - _of_store(0)))


def _of_store(world: int) -> int:
    return 2 * world + 9


def _now() -> int:
    """Open files of this process."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return _WITHOUT_PROC


def _too_few(world: int, where: str, found: int, need: int, place: str) -> BadInput:
    return BadInput(
        "FILES", f"{world} ranks need more open files than are allowed", where=where, found=f"ulimit -n {found}",
        allowed=f"{need} or more",
        fix=f"ulimit -n {need} {place}; a hard limit is raised by nofile in /etc/security/limits.conf, LimitNOFILE of "
        f"the service that starts jobs, or docker run --ulimit nofile={need}",
    )  # fmt: skip
