"""Bytes alive are counted whichever thread frees a storage: a transport's threads are the last to hold some."""

from __future__ import annotations

import threading

import torch

from penteract.engine.device.storages import Storages


class Interrupted(dict[int, int]):
    """Sizes. In another thread than that of the test, taking one gives the test's thread its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.taking, self.allocated = threading.Event(), threading.Event()

    def pop(self, key: int) -> int:  # type: ignore[override]
        size = super().pop(key)
        if threading.current_thread() is not threading.main_thread():
            self.taking.set()
            self.allocated.wait(0.2)  # in vain, where nobody is let in meanwhile
        return size


def test_a_storage_that_another_thread_frees_takes_nothing_of_what_is_allocated_meanwhile() -> None:
    with Storages() as storages:
        storages.sizes = sizes = Interrupted()
        theirs = [torch.empty(100, dtype=torch.uint8)]
        thread = threading.Thread(target=theirs.clear)
        thread.start()
        assert sizes.taking.wait(60)
        ours = torch.empty(7, dtype=torch.uint8)
        sizes.allocated.set()
        thread.join()
    assert storages.now == sum(sizes.values()) == ours.nbytes
