"""Collectives and messages on torch.distributed: gloo on hosts, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine.comm import compat
from penteract.engine.comm.comm import Channel, PeerMemory, Ranks, Round, Work
from penteract.engine.comm.direct.direct_group import DirectGroup
from penteract.engine.comm.groups import CHANNELS, ProcessGroups, axes, needed
from penteract.engine.comm.journal import Entry, GroupLog, Journal
from penteract.engine.dtypes import dtype_of
from penteract.schedule.actions import P2PBatch
from penteract.step.program import Program


@dataclass(slots=True)
class Distributed:
    """`Comm` on the process groups of torch.distributed. `direct`: of the groups whose ranks read each other's
    registers."""

    rank: int
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    journal: Journal = field(default_factory=Journal)
    direct: dict[Ranks, DirectGroup] = field(default_factory=dict[Ranks, DirectGroup])

    def open(self, p: Program) -> None:
        self.groups.make(needed(p))
        self._name_groups(p)

    def share(self, size: int, rounds: Sequence[Round], memory: PeerMemory) -> torch.Tensor | None:
        self.groups.make(rounds)
        if not rounds:
            return None
        block = memory.block(size)
        for number, (groups, channel) in enumerate(rounds):
            if ranks := next((g for g in groups if self.rank in g), ()):
                self.direct[ranks] = DirectGroup(memory.open(block, ranks, self.groups.of(ranks, channel), number))
        memory.settle()
        return block

    def _name_groups(self, p: Program) -> None:
        """Begin the logs of all groups: other ranks look there for who is a member."""
        for axis in axes(p):
            if (ranks := p.mesh.group(axis, self.rank)) and (ranks, "") in self.groups.made:
                self._log(self.groups[ranks], ranks, axis)
        for (ranks, channel), group in self.groups.made.items():
            if not channel:
                self._log(group, ranks)

    def _log(self, group: Any, ranks: Ranks, axis: str = "parameters") -> GroupLog:
        return self.journal.group(group, axis, ranks)

    def _enter(self, group: Any, ranks: Ranks, kind: str, size: int = 0) -> Entry:
        """Note a collective; called right before it."""
        return self.journal.enter(self._log(group, ranks), kind, size)

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Start the collective `kind` from x into y."""
        group = self.groups[ranks]
        if (direct := self.direct.get(ranks)) is not None and direct.takes(kind, x):
            entry = self._enter(group, ranks, kind, max(x.nbytes, y.nbytes))
            started = direct.start(kind, x, y, only_others=bool(attrs.get("only_others")))
            return Work([started], (x, y), entry)
        match kind:
            case "all_gather":
                entry = self._enter(group, ranks, kind, y.nbytes)
                return Work([compat.all_gather(y, x, group)], (x, y), entry)
            case "reduce_scatter":
                entry = self._enter(group, ranks, kind, x.nbytes)
                return Work([compat.reduce_scatter(y, x, group)], (x, y), entry)
            case "all_reduce":
                y.copy_(x)
                return self._all_reduce(ranks, y, largest=attrs.get("reduce") == "max")
            case "all_to_all":
                entry = self._enter(group, ranks, kind, x.nbytes)
                return Work([dist.all_to_all_single(y, x, group=group, async_op=True)], (x, y), entry)
            case "shift":
                return self._shift(group, ranks, x, y)
            case _:
                raise ValueError(f"no collective named {kind}")

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        group = self.groups[ranks]
        entry = self._enter(group, ranks, "all_to_all_v")
        return Work([dist.all_to_all_single(y, x, receive, send, group=group, async_op=True)], (x, y), entry)

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (sum) x over `ranks`, in place."""
        return None if len(ranks) == 1 else self._all_reduce(ranks, x)

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (max) x over `ranks`, in place."""
        return None if len(ranks) == 1 else self._all_reduce(ranks, x, largest=True)

    def _all_reduce(self, ranks: Ranks, x: torch.Tensor, *, largest: bool = False) -> Work:
        group, op = self.groups[ranks], dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        entry = self._enter(group, ranks, "all_reduce (max)" if largest else "all_reduce", x.nbytes)
        return Work([dist.all_reduce(x, op, group=group, async_op=True)], (x,), entry)

    def finish(self, work: Work | None) -> None:
        """Wait; on a GPU, make the current stream wait."""
        if work is None:
            return
        if work.entry is None:
            _wait(work)
        else:
            self.journal.finish(work.entry, partial(_wait, work))

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Channel) -> Work:
        """Post a send of a pipeline of `ranks`. Messages are not batched: NCCL returns one handle for a batch, and
        waiting for its receives would also wait for its sends."""
        entry = self.journal.enter(self.journal.message(what, self.rank, to), "message", x.nbytes)
        return Work([dist.isend(x, to, group=self.groups.of(ranks, what))], (x,), entry)

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Channel) -> Work:
        """Post the matching receive."""
        entry = self.journal.enter(self.journal.message(what, of, self.rank), "message", x.nbytes)
        return Work([dist.irecv(x, of, group=self.groups.of(ranks, what))], (x,), entry)

    def _shift(self, group: Any, ring: Ranks, x: torch.Tensor, y: torch.Tensor) -> Work:
        """Send x to the next rank of the ring, and receive y from the previous one."""
        me = ring.index(self.rank)
        ops = [
            dist.P2POp(dist.isend, x, ring[(me + 1) % len(ring)], group),
            dist.P2POp(dist.irecv, y, ring[me - 1], group),
        ]
        entry = self._enter(group, ring, "shift", x.nbytes)
        return Work(dist.batch_isend_irecv(ops), (x, y), entry)


def _wait(work: Work) -> None:
    for handle in work.waits:
        handle.wait()


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
        super(Nccl, self).open(p)  # slots: the class that `super()` alone would name is another
        for ranks, channel in self.groups.made:
            if not channel:
                self.finish(self._all_reduce(ranks, torch.zeros(1, device="cuda")))
        self._connect_messages(p)
        torch.cuda.synchronize()

    def _log(self, group: Any, ranks: Ranks, axis: str = "parameters") -> GroupLog:
        # The host's own collectives over the world have the same process group, but another backend.
        return self.journal.group(("cuda", group), axis, ranks)

    def _connect_messages(self, p: Program) -> None:
        """Connect the pairs of this rank's pipeline, for each channel, and its ring of context parallelism."""
        lay = p.layout
        border = (p.sequence_length // lay.cp // lay.tp, lay.micro_batch_size, p.model.hidden_size)
        x = torch.zeros(border, dtype=dtype_of("compute", p.precision), device="cuda")
        ranks, y = p.mesh.group("pp", self.rank), torch.empty_like(x)
        batches = (a for a in p.actions if isinstance(a, P2PBatch))
        peers = {p.mesh.neighbour(self.rank, t.peer) for a in batches for t in a.transfers}
        for what, pair in product(CHANNELS, sorted(sorted((self.rank, peer)) for peer in peers - {self.rank})):
            for sender in pair:
                other = pair[sender == pair[0]]
                mine = sender == self.rank
                self.finish(self.send(x, other, ranks, what) if mine else self.receive(y, sender, ranks, what))
        if lay.cp > 1 and lay.cp_method == "ring":
            ring = p.mesh.group("cp", self.rank)
            self.finish(self._shift(self.groups[ring], ring, x, y))
