"""Ends of a process that wait for no other rank."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

LAST_RESORT_S = 12.0  # a rank that is ending exits after this time, whatever blocks it


def exit_later(code: int) -> None:
    """Exit the process with `code` after LAST_RESORT_S, even if the remaining work blocks for ever."""
    timer = threading.Timer(LAST_RESORT_S, os._exit, [code])
    timer.daemon = True
    timer.start()


_codes: list[int] = []  # what this process ends with, once `ends_with` has said so


def end_before_finalising() -> None:
    """Let this process end where Python would begin to take its modules down, after all threads and exit handlers:
    threads of libraries still run then, and now and then one aborts a run that had gone well. Called before other
    handlers are registered: the first runs last, and those of before, of a `sitecustomize`, do not run at all."""
    atexit.register(lambda: exit_now(_codes[-1]) if _codes else None)


def ends_with(code: int) -> int:
    """`code`, which this process will end with."""
    _codes.append(code)
    return code


def exit_now(code: int) -> NoReturn:
    """Exit the process with `code`: what is printed is written, and nothing else is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
