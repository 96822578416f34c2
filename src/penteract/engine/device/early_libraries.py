"""What takes a rank's start without running Python: threads map torch's largest library and initialise the driver of
GPUs, while the first thread imports modules that need neither.

Torch would have both done by the first thread: in its own import, or when it is first asked for GPUs. The driver makes
no context for it. Nothing fails if a thread does: torch does then what is left.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

FLAG = "--gpus"  # of a rank's command line: its run is not on CPUs
# Modules with libraries of their own: who maps one waits for a thread that maps another.
FIRST = ("asyncio", "csv", "datetime", "decimal", "pickle", "ssl", "subprocess")
# Modules of every rank that need no torch.
BESIDE = (
    "penteract.config.resolve.write_run_file", "penteract.step.program", "penteract.model.decoder",
    "penteract.engine.session.outputs.display", "penteract.engine.session.grace", "unittest.mock",
)  # fmt: skip
# As torch loads them. What it takes care to load before its library for GPUs is left to it, as is that one.
LIBRARIES = {"libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL, "libtorch_cpu.so": os.RTLD_NOW}
# A thread has memory of its own, which grows by a page at a time: 11,000 system calls for what torch allocates as it is
# mapped. So it grows by blocks of this size first, to almost all that the C library has for a thread at once.
BLOCK, BLOCKS = 100_000, 620
_DRIVER = "libcuda.so.1"
_LAZY = 12020  # the version from which it loads kernels when they are called, as torch has it do with others too


def begin() -> None:
    """Begin both, and import what needs neither."""
    for name in FIRST:
        with suppress(ImportError):  # ssl, of a Python that was built without
            import_module(name)
    found = find_spec("torch") if sys.platform == "linux" else None
    if found is not None and found.origin:
        Thread(target=map_torch, args=(Path(found.origin).parent / "lib",), name="torch", daemon=True).start()
    if FLAG in sys.orig_argv:
        Thread(target=initialise_driver, name="driver", daemon=True).start()
    for name in BESIDE:
        import_module(name)


def map_torch(folder: Path) -> bool:
    """Map torch's libraries in `folder`; whether all of them are."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)  # whose calls let other threads run
        load, allocate, free = library.dlopen, library.malloc, library.free
        load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        allocate.argtypes, allocate.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
        for block in [allocate(BLOCK) for _ in range(BLOCKS)][:-1]:  # the last keeps the others' memory from shrinking
            free(block)
        return all(load(os.fsencode(folder / name), how) for name, how in LIBRARIES.items())
    return False


def initialise_driver() -> None:
    """Initialise the driver of GPUs, if there is one. Torch finds it initialised, or waits for it."""
    with suppress(OSError, AttributeError):
        driver, version = ctypes.CDLL(_DRIVER), ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= _LAZY:
            driver.cuInit(0)
