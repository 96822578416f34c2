"""Memory of a CPU's ranks: anonymous files, which vanish with their processes however these end."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine.comm.comm import PeerBlocks, Ranks


@dataclass(frozen=True, slots=True)
class _Done:
    """Work in a thread."""

    future: Future[None]

    def wait(self) -> None:
        """Wait until it is done."""
        self.future.result()


class HostPeers:
    """Blocks that processes of one user on one host map. Linux: another process opens a file by its number."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}  # where a block begins -> its file

    def block(self, size: int) -> torch.Tensor:
        """The file is as large as the block, and not of one byte less than one."""
        file = os.memfd_create("penteract")
        os.ftruncate(file, max(1, size))
        made = _mapped(file, size)
        self.files[made.data_ptr()] = file
        return made

    def open(self, block: torch.Tensor, ranks: Ranks, group: Any, number: int) -> PeerBlocks:
        """They tell each other process and file."""
        published: list[Any] = [None] * len(ranks)
        dist.all_gather_object(published, (os.getpid(), self.files[block.data_ptr()]), group)
        me = dist.get_group_rank(group, dist.get_rank())
        blocks = [block if i == me else _opened(where[0], where[1], block.numel()) for i, where in enumerate(published)]
        meet = partial(dist.all_reduce, torch.zeros(1), group=group)
        meet()  # all have opened them
        # A thread does them one after the other: the schedule is proven for collectives that do not block where they
        # start.
        thread = ThreadPoolExecutor(1, f"direct {ranks}")

        def start_work(work: Callable[[], None]) -> _Done:
            return _Done(thread.submit(work))

        return PeerBlocks(blocks, me, meet, start_work)

    def settle(self) -> None:
        """Blocks stay mapped without their files."""
        for file in self.files.values():
            os.close(file)
        self.files.clear()


def _opened(process: int, file: int, size: int) -> torch.Tensor:
    found = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return _mapped(found, size)
    finally:
        os.close(found)


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, max(1, size)), dtype=torch.uint8, count=size)
