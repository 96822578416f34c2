"""The operations between ranks that are timed, by the calls with which a step makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penteract.config.files.hardware_schema import DIRECT, DIRECTLY
from penteract.engine.comm.comm import Comm, Work
from penteract.engine.comm.distributed import Distributed
from penteract.engine.comm.groups import ProcessGroups, Round
from penteract.engine.device.device import Device, device_of
from penteract.engine.rank.rank import Rank
from penteract.errors import Bug
from penteract.measure.calibrate.links.link_workloads import (
    COLLECTIVES,
    COPIES,
    PAIR,
    SEND,
    SHIFT,
    Hosts,
    LinkWorkload,
    Ranks,
)

_ITEM = 4  # bytes of an element: fp32


@dataclass(frozen=True, slots=True)
class LinkOperation:
    """`start`: begins it, and returns what is under way. On a GPU `finish` makes the current stream wait, not the
    host."""

    start: Callable[[], Work | None]
    finish: Callable[[Work | None], None]

    def __call__(self) -> None:
        """One after the other, as calls of a step."""
        self.finish(self.start())


@dataclass(frozen=True, slots=True)
class LinkOperations:
    """Of one rank. Its groups are made once, by all ranks in the same order."""

    rank: Rank
    device: Device
    comm: Comm
    hosts: Hosts
    shared: list[torch.Tensor] = field(default_factory=list[torch.Tensor], compare=False)

    @staticmethod
    def of(rank: Rank, hosts: Hosts) -> LinkOperations:
        """Make the groups of neighbours of every size, those of whole hosts, and the channel of messages."""
        device, world = device_of(rank.device), tuple(range(rank.world))
        comm = device.comm(rank.number, rank.progress.journal, rank.progress.limits.collective)
        if not isinstance(comm, Distributed):
            raise Bug("COMM", "a communicator without process groups")
        groups: ProcessGroups = comm.groups
        inside = (Round(hosts.groups(n)) for n in hosts.sizes())
        groups.make([*inside, *(Round(hosts.whole(n)) for n in hosts.host_counts()), Round((world,), "value")])
        return LinkOperations(rank, device, comm, hosts)

    def share(self, size: int) -> None:
        """Ranks of a host read so many bytes of each other from now on. Called by all ranks."""
        rounds = [Round(self.hosts.groups(n), "direct") for n in self.hosts.sizes()]
        block = self.comm.share(size, rounds, self.device.peer_memory)
        self.shared.extend([] if block is None else [block.view(torch.float32).fill_(1)])

    def __call__(self, workload: LinkWorkload) -> LinkOperation | None:
        """The operation of this rank; None where it is in no group, or where nothing is sent."""
        group = workload.group(self.rank.number)
        if group is None or not workload.size:
            return None
        elements = -(-workload.size // (_ITEM * len(group))) * len(group)
        return LinkOperation(self._start(workload.kind, group, elements), self.comm.finish)

    def _start(self, kind: str, group: Ranks, elements: int) -> Callable[[], Work | None]:
        comm, part = self.comm, elements // len(group)
        if kind in COPIES:
            host = torch.ones(elements, pin_memory=self.device.pinned)
            x, y = (host, self._ones(elements)) if kind == COPIES[0] else (self._ones(elements), host)
            return lambda: self.device.copy(x, y)
        if kind in (SEND, PAIR):
            return self._message(group, elements)
        if kind == "all_reduce":
            x = self._ones(elements).zero_()  # in place: a sum of ones would grow
            return lambda: comm.sum(group, x)
        direct, kind = kind in DIRECT, kind.removeprefix(DIRECTLY)
        if kind not in (*COLLECTIVES, SHIFT):
            raise Bug("LINK", "no such operation", found=kind)
        sent, got = part if kind == "all_gather" else elements, part if kind == "reduce_scatter" else elements
        x, y = self.shared[0][:sent] if direct else self._ones(sent), self._ones(got)
        return lambda: comm.start(kind, group, x, y, {})

    def _message(self, pair: Sequence[int], elements: int) -> Callable[[], Work]:
        """As pipelines send: this rank's part of a message from the first of a pair to the second."""
        comm, world, x = self.comm, tuple(range(self.rank.world)), self._ones(elements)
        if self.rank.number == pair[0]:
            return lambda: comm.send(x, pair[1], world, "value")
        return lambda: comm.receive(x, pair[0], world, "value")

    def _ones(self, elements: int) -> torch.Tensor:
        return torch.ones(elements, device=self.rank.device)
