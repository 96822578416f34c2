"""What an exception means: as an error of penteract, and whether another rank's end caused it."""

from __future__ import annotations

import errno
import re

import torch
import torch.distributed as dist

from penteract.errors import Bug, DiskFailure, OutOfMemory, PenteractError


def from_exception(e: BaseException) -> PenteractError:
    """Any exception as a PenteractError."""
    text = first_line(e)
    if isinstance(e, PenteractError):
        return e
    if isinstance(e, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        fix = "a smaller micro-batch, more recompute, or more ranks"
        return OutOfMemory("MEMORY", text or "out of memory", fix=fix)
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        where = str(e.filename or "")
        return DiskFailure("DISK", "could not write", where=where, found=e.strerror, fix="free some space")
    return Bug("BUG", f"{type(e).__name__}: {text}", fix="run again with --debug, and report it")


def is_of_a_peer(e: BaseException) -> bool:
    """Whether this is the exception of a connection to a rank that has ended."""
    if isinstance(e, dist.DistError):
        return True
    return type(e) is RuntimeError and bool(
        re.search(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe", str(e))
    )


def first_line(e: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters."""
    return (str(e).splitlines() or [""])[0][:200]
