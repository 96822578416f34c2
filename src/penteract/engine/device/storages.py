"""Measure memory on devices whose allocator has no counters, by tracking every storage that passes torch's
dispatcher."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """`now`: bytes of living storages that were allocated under this mode; `peak`: the most at once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around each operator: nothing here is compiled, and loading it for the first
        one takes a process as long as loading torch."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._next = 0
        # A storage is freed by whichever thread drops it last, such as one of gloo's: none may change a sum while
        # another has read it. A thread that holds the lock may free one as well, where the garbage collector runs.
        self._lock = threading.RLock()
        # Of each storage that is alive and was met, by its address in torch: its number (0 of one that was there
        # before), and what tells when it is freed, which is before torch can give its address to another.
        self._met: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in (out,) if isinstance(out, torch.Tensor) else tensors_of(out):
            storage = t.untyped_storage()
            if storage._cdata not in self._met:
                self._meet(storage, tensors_of((args, kwargs)))
        return out

    def _meet(self, storage: Any, given: Iterable[torch.Tensor]) -> None:
        """A result has this storage, for the first time: it is new unless an argument has it too."""
        address, key = storage._cdata, 0
        if all(t.untyped_storage()._cdata != address for t in given):
            with self._lock:
                self._next += 1
                key = self._next
                self._track(key, storage)

        def gone(_: Any) -> None:
            with self._lock:
                del self._met[address]
                if key:
                    self._freed(key)

        self._met[address] = key, weakref.ref(storage, gone)

    def number(self, t: torch.Tensor) -> int | None:
        """The number of a tensor's storage, if it was allocated under this mode."""
        met = self._met.get(t.untyped_storage()._cdata)
        return met[0] or None if met else None

    def _track(self, key: int, storage: Any) -> None:
        self.sizes[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in the nested tuples, lists and dicts of an operator's arguments or results."""
    found, left = list[torch.Tensor](), [tree]
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            left.extend(reversed(x))
        elif isinstance(x, dict):
            left.extend(reversed(x.values()))
    return found


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors begin at the same place of one storage. Addresses would not tell on a device without
    memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors; a shared storage counts once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
