"""Observe memory where no allocator counts: every storage that torch's dispatcher hands out, until it dies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Bytes of storages born under this mode and alive, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._next = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in inputs:
                self._born(t.untyped_storage())
        return out

    def _born(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._next += 1
        key, size = self._next, storage.nbytes()
        self._known[storage] = key
        self.sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._died, key)

    def _died(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
