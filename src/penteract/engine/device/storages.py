"""Measure memory on devices whose allocator has no counters, by tracking every storage that passes torch's
dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
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
        self._tracked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tensors_of(out) if t.untyped_storage() not in self._tracked]
        if made:
            given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
            for t in made:
                if t.untyped_storage()._cdata not in given:
                    self._track(t.untyped_storage())
        return out

    def _track(self, storage: Any) -> None:
        self._next += 1
        key, size = self._next, storage.nbytes()
        self._tracked[storage] = key
        self.sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in the nested tuples, lists and dicts of an operator's arguments or results."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_of(x)
    elif isinstance(tree, dict):
        yield from tensors_of(list(tree.values()))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors begin at the same place of one storage. Addresses would not tell on a device without
    memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors; a shared storage counts once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
