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
        """Start the collective `kind` from x into y."""
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
        handle = dist.all_to_all_single(y, x, receive, send, group=self.groups[ranks], async_op=True)
        return Work([handle], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (sum) x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Work([dist.all_reduce(x, group=self.groups[ranks], async_op=True)], (x,))

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (max) x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Work([dist.all_reduce(x, dist.ReduceOp.MAX, group=self.groups[ranks], async_op=True)], (x,))

    def finish(self, work: Work | None) -> None:
        """Wait; on a GPU, make the current stream wait."""
        for handle in work.waits if work is not None else ():
            handle.wait()

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Channel) -> Work:
        """Post a send of a pipeline of `ranks`. Messages are not batched: NCCL returns one handle for a batch, and
        waiting for its receives would also wait for its sends."""
        return Work([dist.isend(x, to, group=self.groups.of(ranks, what))], (x,))

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Channel) -> Work:
        """Post the matching receive."""
        return Work([dist.irecv(x, of, group=self.groups.of(ranks, what))], (x,))

    def _shift(self, group: Any, ring: Ranks, x: torch.Tensor, y: torch.Tensor) -> Work:
        """Send x to the next rank of the ring, and receive y from the previous one."""
        me = ring.index(self.rank)
        ops = [
            dist.P2POp(dist.isend, x, ring[(me + 1) % len(ring)], group),
            dist.P2POp(dist.irecv, y, ring[me - 1], group),
        ]
        return Work(dist.batch_isend_irecv(ops), (x, y))


class Gloo(Distributed):
    """Collectives on CPUs. A gloo group connects when it is made."""


@dataclass(slots=True)
class Nccl(Distributed):
    """Collectives on GPUs. The first use of an NCCL group, and the first send or receive of a pair, block the host
    until the other side arrives. In the middle of a step two such waits can deadlock, because schedules are only proven
    free of deadlock for sends and receives that do not block. So `open` connects everything, in the same order on all
    ranks, so that no ranks wait in a cycle."""

    groups: ProcessGroups = field(default_factory=lambda: ProcessGroups("nccl"))

    def open(self, p: Program) -> None:
        self.groups.make(needed(p))
        for (_, channel), group in self.groups.made.items():
            if not channel:
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        self._connect_messages(p)
        torch.cuda.synchronize()

    def _connect_messages(self, p: Program) -> None:
        """Connect the pairs of this rank's pipeline, for each channel, and its ring of context parallelism."""
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
