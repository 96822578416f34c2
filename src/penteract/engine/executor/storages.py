"""Observe memory where no allocator counts: every storage that torch's dispatcher hands out, until it dies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Bytes of storages born under this mode and alive, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._next = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tensors_of(out) if t.untyped_storage() not in self._known]
        if made:
            given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
            for t in made:
                if t.untyped_storage()._cdata not in given:
                    self._born(t.untyped_storage())
        return out

    def _born(self, storage: Any) -> None:
        self._next += 1
        key, size = self._next, storage.nbytes()
        self._known[storage] = key
        self.sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._died, key)

    def _died(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Those in the nested tuples, lists and dicts that an operator takes and gives."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_of(x)
    elif isinstance(tree, dict):
        yield from tensors_of(list(tree.values()))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
