"""Stop at, or fail in, each file operation: everything that changes files goes through these functions of `os`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

OPERATIONS = (
    "open",
    "write",
    "pwritev",
    "fsync",
    "close",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "posix_fallocate",
)
CHANGES = frozenset({*OPERATIONS} - {"open", "close"})  # what a dying disk fails
GROWS = frozenset({"write", "pwritev", "mkdir", "posix_fallocate"})  # what a full disk fails


class Crash(BaseException):
    """The process is gone: not an Exception, so that nothing tidies up."""


def _patched(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, tuple[Any, ...]], None]) -> list[str]:
    """`before(name, arguments)` is called before each operation; returns the log of those that happened."""
    happened, lock = list[str](), threading.Lock()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            with lock:
                before(name, args)
                happened.append(name)
            return real(*args, **named)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return happened


def crash_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let `count` operations happen, then nothing more: killed after one, and so before the next."""
    happened = list[str]()

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if len(happened) >= count:
            raise Crash

    happened = _patched(monkeypatch, before)
    return happened


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: int, *, lasting: bool = False) -> list[str]:
    """The operation after `count` others that change files raises this OSError; if `lasting`, so do all later ones.

    The log has one entry, if that happened. A file that was opened is closed; nothing of a failed write is written.
    """
    left, failed = [count], list[str]()
    names = GROWS if error == 28 or error == 122 else CHANGES  # ENOSPC, EDQUOT

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        creates = name == "open" and len(arguments) > 1 and arguments[1] & os.O_CREAT
        if name not in names and not creates:
            return
        left[0] -= 1
        if left[0] == -1 or (lasting and left[0] < 0):
            failed[:] = [name]
            raise OSError(error, os.strerror(error))

    _patched(monkeypatch, before)
    return failed
