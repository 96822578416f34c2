"""The driver of GPUs is initialised in a thread while a rank imports torch. The kernel takes a part of a second for it,
and no memory of a GPU. Torch would have it done when it is first asked for GPUs, and let no other thread run Python
meanwhile."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Thread

FLAG = "--gpus"  # of a rank's command line: its run is not on CPUs
_LIBRARY = "libcuda.so.1"
_LAZY = 12020  # the version from which it loads kernels when they are called, as torch has it do with others too


def begin_driver() -> Thread:
    """Begin; nothing fails if it does. Torch finds the driver initialised, or waits for it."""
    thread = Thread(target=_initialise, name="driver", daemon=True)
    thread.start()
    return thread


def _initialise() -> None:
    with suppress(OSError, AttributeError):
        driver, version = ctypes.CDLL(_LIBRARY), ctypes.c_int()  # whose calls let other threads run
        if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= _LAZY:
            driver.cuInit(0)
