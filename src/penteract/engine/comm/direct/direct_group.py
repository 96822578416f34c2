"""Collectives by reading: each rank takes what it needs from the others' memory.

What is copied between GPUs needs no multiprocessor of one: copy engines move it. A sum is added in the dtype of its
tensor, as a ring does, each rank beginning with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.comm.comm import PeerBlocks, Waitable
from penteract.parallel.direct import KINDS

Key = tuple[str, int, int, int, torch.dtype]  # kind, addresses of both tensors, bytes of the first, their dtype
Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from


@dataclass(frozen=True, slots=True)
class BoundCollective:
    """A collective of given tensors. `own`: the copy of this rank's own share, if it has one; `work`: all else."""

    own: Pair | None
    work: Callable[[], None]


@dataclass(slots=True)
class DirectGroup:
    """The collectives of one group. `number`: how many it has started. Registers lie at the same places in every step,
    so views of them are made once: `made` has them by kind, places and size."""

    peers: PeerBlocks
    number: int = 0
    made: dict[Key, BoundCollective] = field(default_factory=dict[Key, BoundCollective])

    def takes(self, kind: str, x: torch.Tensor) -> bool:
        """Whether it does a collective of this kind from x. All ranks of the group get the same answer: their registers
        have the same places."""
        own = self.peers.blocks[self.peers.me]
        begin, end = own.data_ptr(), own.data_ptr() + own.nbytes
        return kind in KINDS and begin <= x.data_ptr() and x.data_ptr() + x.nbytes <= end

    def start(self, kind: str, x: torch.Tensor, y: torch.Tensor, *, only_others: bool = False) -> Waitable:
        """Start it. x, y: contiguous. Ranks meet before, when each x is complete, and after, when each x is read.

        Copies between GPUs need no multiprocessor, but those on one do: beside a product they would wait for its end,
        and others behind them. So this rank's own share is copied by compute. `only_others`: nobody reads its place.
        """
        self.number += 1
        key = (kind, x.data_ptr(), y.data_ptr(), x.nbytes, x.dtype)
        if (transfer := self.made.get(key)) is None:
            transfer = self.made[key] = self._transfer(kind, x.view(-1), y.view(-1))
        started = self.peers.start_work(transfer.work)
        if transfer.own is not None and not only_others:
            transfer.own[0].copy_(transfer.own[1])
        return started

    def _transfer(self, kind: str, x: torch.Tensor, y: torch.Tensor) -> BoundCollective:
        n, me = len(self.peers.blocks), self.peers.me
        if kind == "reduce_scatter":
            own, *others = [self._of(i, x).chunk(n)[me] for i in (me, *self._others)]
            return BoundCollective(None, self._met(lambda: _put_sum(y, own, others)))
        parts, whole = y.chunk(n), kind == "all_gather"
        pairs = [(parts[i], self._of(i, x) if whole else self._of(i, x).chunk(n)[me]) for i in self._others]
        return BoundCollective((parts[me], x if whole else x.chunk(n)[me]), self._met(lambda: _copy(pairs)))

    def _met(self, read: Callable[[], None]) -> Callable[[], None]:
        """Reading, with what is before and after it."""

        def work() -> None:
            self.peers.meet()
            read()
            self.peers.meet()

        return work

    @property
    def _others(self) -> Iterator[int]:
        """The next ranks: no two ranks read the same one at a time."""
        n = len(self.peers.blocks)
        return ((self.peers.me + step) % n for step in range(1, n))

    def _of(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The tensor of rank i that lies where x does here."""
        at = x.data_ptr() - self.peers.blocks[self.peers.me].data_ptr()
        return self.peers.blocks[i][at : at + x.nbytes].view(x.dtype)


def _copy(pairs: Sequence[Pair]) -> None:
    """One after the other: on several streams of a GPU they take longer, as ranks then read one another at once."""
    for there, here in pairs:
        there.copy_(here, non_blocking=True)


def _put_sum(y: torch.Tensor, own: torch.Tensor, others: list[torch.Tensor]) -> None:
    torch.add(own, others[0], out=y)
    for other in others[1:]:
        y.add_(other)
