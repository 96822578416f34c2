"""Collectives by reading: each rank takes what it needs from the others' memory.

A gather needs no multiprocessors of a GPU: copy engines move it. A sum is added in the dtype of its tensor, as a ring
does, each rank beginning with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penteract.engine.comm.comm import Exchange, Waitable
from penteract.parallel.direct import KINDS


@dataclass(slots=True)
class DirectGroup:
    """The collectives of one group. `number`: how many it has started."""

    peers: Exchange
    number: int = 0

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
        x, y = x.view(-1), y.view(-1)
        take = {"all_gather": self._gather, "reduce_scatter": self._sum, "all_to_all": self._exchange}[kind]

        def work() -> None:
            self.peers.meet()
            take(x, y)
            self.peers.meet()

        started, me = self.peers.beside(work), self.peers.me
        if kind != "reduce_scatter" and not only_others:
            own = x if kind == "all_gather" else x.chunk(self._ranks)[me]
            y.chunk(self._ranks)[me].copy_(own)
        return started

    def _gather(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x of another rank i -> the i-th part of y."""
        parts = y.chunk(self._ranks)
        for i in self._others:
            parts[i].copy_(self._of(i, x))

    def _sum(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """This rank's part of each x, added -> y."""
        mine, *others = [self._of(i, x).chunk(self._ranks)[self.peers.me] for i in (self.peers.me, *self._others)]
        torch.add(mine, others[0], out=y)
        for other in others[1:]:
            y.add_(other)

    def _exchange(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """This rank's part of x of another rank i -> the i-th part of y."""
        parts = y.chunk(self._ranks)
        for i in self._others:
            parts[i].copy_(self._of(i, x).chunk(self._ranks)[self.peers.me])

    @property
    def _ranks(self) -> int:
        return len(self.peers.blocks)

    @property
    def _others(self) -> Sequence[int]:
        """The next ranks: no two ranks read the same one at a time."""
        return [(self.peers.me + step) % self._ranks for step in range(1, self._ranks)]

    def _of(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The tensor of rank i that lies where x does here."""
        at = x.data_ptr() - self.peers.blocks[self.peers.me].data_ptr()
        return self.peers.blocks[i][at : at + x.nbytes].view(x.dtype)
