"""Collectives and transfers on torch.distributed: `start` puts one on the wire, `finish` waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine import compat
from penteract.engine.comm.groups import CHANNELS, Channel, Groups, Ranks
from penteract.schedule.actions import Exchange
from penteract.step.program import Program


@dataclass(slots=True)
class Flight:
    """A collective under way. It pins its buffers."""

    works: list[Any]
    pinned: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Comm:
    """One rank's lines to the others."""

    groups: Groups
    rank: int

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Flight:
        """Begin `kind` from x into y."""
        group = self.groups[ranks]
        match kind:
            case "all_gather":
                return Flight([compat.all_gather(y, x, group)], (x, y))
            case "reduce_scatter":
                return Flight([compat.reduce_scatter(y, x, group)], (x, y))
            case "all_reduce":
                y.copy_(x)
                op = dist.ReduceOp.MAX if attrs.get("reduce") == "max" else dist.ReduceOp.SUM
                return Flight([dist.all_reduce(y, op, group=group, async_op=True)], (y,))
            case "all_to_all":
                return Flight([dist.all_to_all_single(y, x, group=group, async_op=True)], (x, y))
            case "shift":
                return self._shift(group, ranks, x, y)
            case _:
                raise ValueError(f"no collective named {kind}")

    def start_uneven(
        self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]
    ) -> Flight:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        work = dist.all_to_all_single(y, x, receive, send, group=self.groups[ranks], async_op=True)
        return Flight([work], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Flight | None:
        """Sum x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Flight([dist.all_reduce(x, group=self.groups[ranks], async_op=True)], (x,))

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Flight | None:
        """The largest of each number of x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Flight([dist.all_reduce(x, dist.ReduceOp.MAX, group=self.groups[ranks], async_op=True)], (x,))

    def finish(self, flight: Flight | None) -> None:
        """Wait; on a GPU: let the stream wait."""
        for work in flight.works if flight is not None else ():
            work.wait()

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Channel) -> Flight:
        """Post a message of a pipeline of `ranks`. Each has a handle of its own: NCCL gives one for a whole batch, and
        to wait for what is received would be to wait for what is sent with it."""
        return Flight([dist.isend(x, to, group=self.groups.of(ranks, what))], (x,))

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Channel) -> Flight:
        """Post the other half of a message."""
        return Flight([dist.irecv(x, of, group=self.groups.of(ranks, what))], (x,))

    def connect(self, p: Program, x: torch.Tensor) -> None:
        """On GPUs: set up the lines of this rank's messages, for such as x. By all ranks.

        A first send or receive makes its host wait for the other side's; schedules are proven for posts that do not.
        All ranks go through the pairs in one order, so that none waits in a cycle.
        """
        if x.device.type != "cuda":
            return
        ranks, y = p.mesh.group("pp", self.rank), torch.empty_like(x)
        exchanges = (a for a in p.actions if isinstance(a, Exchange))
        peers = {p.mesh.neighbour(self.rank, t.peer) for a in exchanges for t in a.transfers}
        for what, pair in product(CHANNELS, sorted(sorted((self.rank, peer)) for peer in peers - {self.rank})):
            for sender in pair:
                other = pair[sender == pair[0]]
                mine = sender == self.rank
                self.finish(self.send(x, other, ranks, what) if mine else self.receive(y, sender, ranks, what))
        if p.layout.cp > 1 and p.layout.context_method == "ring":
            ring = p.mesh.group("cp", self.rank)
            self.finish(self._shift(self.groups[ring], ring, x, y))
        torch.cuda.synchronize()

    def _shift(self, group: Any, ring: Ranks, x: torch.Tensor, y: torch.Tensor) -> Flight:
        """x to the next of the ring, y from the one before."""
        me = ring.index(self.rank)
        ops = [
            dist.P2POp(dist.isend, x, ring[(me + 1) % len(ring)], group),
            dist.P2POp(dist.irecv, y, ring[me - 1], group),
        ]
        return Flight(dist.batch_isend_irecv(ops), (x, y))
