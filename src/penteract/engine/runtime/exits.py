"""Ends of a process that wait for no other rank."""

from __future__ import annotations

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


def exit_now(code: int) -> NoReturn:
    """Exit the process with `code`: what is printed is written, and nothing else is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
