"""What an exception means: as an error of penteract, and whether another rank's end caused it."""

from __future__ import annotations

import errno
import re

import torch
import torch.distributed as dist

from penteract.errors import Bug, DiskFailure, OutOfMemory, PeerLost, PenteractError
from penteract.units import show_bytes


def from_exception(e: BaseException) -> PenteractError:
    """Any exception as a PenteractError."""
    text = first_line(e)
    if isinstance(e, PenteractError):
        return e
    if lacks_memory(e):
        fix = "a smaller micro-batch, more recompute, or more ranks"
        return OutOfMemory("MEMORY", text or "out of memory", allowed=_most_on_device(), fix=fix)
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        where = str(e.filename or "")
        return DiskFailure("DISK", "could not write", where=where, found=e.strerror, fix="free some space")
    if isinstance(e, dist.DistError):  # while ranks join: later, the watch finds out which rank is gone
        return PeerLost("LOST", f"another rank is gone, or its launcher: {text}",
                        fix="see what the other ranks print, and start them again")  # fmt: skip
    return Bug("BUG", f"{type(e).__name__}: {text}", fix="run again with --debug, and report it")


def _most_on_device() -> str:
    """What torch may hold on this process's GPU: what it has, and what other processes leave free."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        return show_bytes(torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0])
    except RuntimeError:  # the device answers nothing any more
        return ""


# How torch, CUDA, cuBLAS, NCCL and the host say that there is no memory left.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|_ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.I,
)


def lacks_memory(e: BaseException) -> bool:
    """Whether there was no memory left, on the device or on the host. A kernel that needs more shared memory than a GPU
    has is no such thing."""
    if isinstance(e, MemoryError | torch.OutOfMemoryError) or getattr(e, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(e, RuntimeError) and _NO_MEMORY.search(str(e)) is not None


def is_of_a_peer(e: BaseException) -> bool:
    """Whether this is the exception of a connection to a rank that has ended."""
    if lacks_memory(e):  # NCCL's of this rank
        return False
    if isinstance(e, dist.DistError):
        return True
    return type(e) is RuntimeError and bool(
        re.search(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe", str(e))
    )


def first_line(e: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters."""
    return (str(e).splitlines() or [""])[0][:200]
