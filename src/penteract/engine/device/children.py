"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from penteract.errors import PeerLost


def bound_to_parent() -> Callable[[], None]:
    """A function that a child calls first: on Linux the kernel then kills the child when its parent ends for any
    reason."""
    parent = os.getpid()
    prctl: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before the fork

    def bind() -> None:
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # it had ended before
                os._exit(PeerLost.exit_code)

    return bind
