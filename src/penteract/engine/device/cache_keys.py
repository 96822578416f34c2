"""Keys of kernels in Triton's cache, which are the same in every process: one compiles what others look for.

The key of a kernel has the constants of the functions that it calls. Triton 3.6 takes them from each function before it
has looked for them there, so it finds those alone that a kernel before this one had it look for: the key depends on
which kernels a process compiled before. Triton 3.9 looks first.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from triton.runtime import cache, jit

_ONE = Lock()


def callees_first() -> None:
    """From now on the constants of a function that a kernel calls are looked for before they are taken, whichever
    version of Triton this is."""
    finder: Any = jit.DependenciesFinder
    if (taking := getattr(finder, "_update_hash", None)) is None:  # a version that nobody has read
        return

    def looked_for(self: Any, func: Any) -> None:
        _ = func.cache_key  # which looks for them
        taking(self, func)

    finder._update_hash = looked_for


def hash_triton() -> None:
    """Have Triton hash its own files, which is a part of every key and takes a third of a second. It remembers that;
    whoever needs it before this has ended hashes them too."""
    with _ONE:
        getattr(cache, "triton_key", lambda: "")()  # which remembers it
