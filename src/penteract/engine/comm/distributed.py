"""Collectives and messages on torch.distributed: gloo on hosts, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine import compat
from penteract.engine.comm.comm import Ranks, Work
from penteract.engine.comm.groups import CHANNELS, Channel, ProcessGroups, needed
from penteract.engine.dtypes import dtype_of
from penteract.schedule.actions import Exchange
from penteract.step.program import Program


@dataclass(slots=True)
class Distributed:
    """`Comm` on the process groups of torch.distributed."""

    rank: int
    groups: ProcessGroups = field(default_factory=ProcessGroups)

    def open(self, p: Program) -> None:
        self.groups.make(needed(p))

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Begin `kind` from x into y."""
        group = self.groups[ranks]
        match kind:
            case "all_gather":
                return Work([compat.all_gather(y, x, group)], (x, y))
            case "reduce_scatter":
                return Work([compat.reduce_scatter(y, x, group)], (x, y))
            case "all_reduce":
                y.copy_(x)
                op = dist.ReduceOp.MAX if attrs.get("reduce") == "max" else dist.ReduceOp.SUM
                return Work([dist.all_reduce(y, op, group=group, async_op=True)], (y,))
            case "all_to_all":
                return Work([dist.all_to_all_single(y, x, group=group, async_op=True)], (x, y))
            case "shift":
                return self._shift(group, ranks, x, y)
            case _:
                raise ValueError(f"no collective named {kind}")

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        one = dist.all_to_all_single(y, x, receive, send, group=self.groups[ranks], async_op=True)
        return Work([one], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """Sum x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Work([dist.all_reduce(x, group=self.groups[ranks], async_op=True)], (x,))

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """The largest of each number of x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Work([dist.all_reduce(x, dist.ReduceOp.MAX, group=self.groups[ranks], async_op=True)], (x,))

    def finish(self, work: Work | None) -> None:
        """Wait; on a GPU: let the stream wait."""
        for one in work.waits if work is not None else ():
            one.wait()

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Channel) -> Work:
        """Post a message of a pipeline of `ranks`. Each has a handle of its own: NCCL gives one for a whole batch, and
        to wait for what is received would be to wait for what is sent with it."""
        return Work([dist.isend(x, to, group=self.groups.of(ranks, what))], (x,))

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Channel) -> Work:
        """Post the other half of a message."""
        return Work([dist.irecv(x, of, group=self.groups.of(ranks, what))], (x,))

    def _shift(self, group: Any, ring: Ranks, x: torch.Tensor, y: torch.Tensor) -> Work:
        """x to the next of the ring, y from the one before."""
        me = ring.index(self.rank)
        ops = [
            dist.P2POp(dist.isend, x, ring[(me + 1) % len(ring)], group),
            dist.P2POp(dist.irecv, y, ring[me - 1], group),
        ]
        return Work(dist.batch_isend_irecv(ops), (x, y))


class Gloo(Distributed):
    """Between hosts' CPUs: a group connects when it is made."""


@dataclass(slots=True)
class Nccl(Distributed):
    """On GPUs a group's first use, and a first send or receive, make the host wait for the other side's: in the middle
    of a step that wait, crossed with another rank's, can be for ever. So lines connect when they are opened, all ranks
    in one order, that none waits in a cycle; schedules are proven for posts that do not wait."""

    groups: ProcessGroups = field(default_factory=lambda: ProcessGroups("nccl"))

    def open(self, p: Program) -> None:
        self.groups.make(needed(p))
        for (_, channel), group in self.groups.made.items():
            if not channel:
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        self._connect_messages(p)
        torch.cuda.synchronize()

    def _connect_messages(self, p: Program) -> None:
        """Of this rank's pipeline, for each of what they carry; and of its ring."""
        lay = p.layout
        border = (p.sequence_length // lay.cp // lay.tp, lay.micro_batch_size, p.model.hidden_size)
        x = torch.zeros(border, dtype=dtype_of("compute", p.precision), device="cuda")
        ranks, y = p.mesh.group("pp", self.rank), torch.empty_like(x)
        exchanges = (a for a in p.actions if isinstance(a, Exchange))
        peers = {p.mesh.neighbour(self.rank, t.peer) for a in exchanges for t in a.transfers}
        for what, pair in product(CHANNELS, sorted(sorted((self.rank, peer)) for peer in peers - {self.rank})):
            for sender in pair:
                other = pair[sender == pair[0]]
                mine = sender == self.rank
                self.finish(self.send(x, other, ranks, what) if mine else self.receive(y, sender, ranks, what))
        if lay.cp > 1 and lay.cp_method == "ring":
            ring = p.mesh.group("cp", self.rank)
            self.finish(self._shift(self.groups[ring], ring, x, y))
