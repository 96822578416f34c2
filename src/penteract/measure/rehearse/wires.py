"""A communicator and a device without peers: what goes on a wire, and what is waited for, is written down in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from penteract.engine.comm.comm import Channel, Comm, PeerMemory, Ranks, Round, Work
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.comm.journal import Journal
from penteract.engine.device.device import Meta
from penteract.measure.rehearse.findings import Findings
from penteract.ops.collectives import KINDS
from penteract.step.program import Program


class RehearsedWire(NamedTuple):
    """A collective of `ranks`, a message from `ranks[0]` to `ranks[1]`, or a copy to or from the host.

    `bytes`: as `ops.collectives.payload` counts them; `channel`: of messages; `at`: the step's event that starts it
    """

    kind: str
    ranks: Ranks
    bytes: int
    dtype: str
    channel: str
    at: str


class WireEvent(NamedTuple):
    """`number`: of the wire, which starts or is waited for here."""

    wait: bool
    number: int


@dataclass(slots=True)
class WireLog:
    """All wires of a rank, and its events in order."""

    findings: Findings
    wires: list[RehearsedWire] = field(default_factory=list[RehearsedWire])
    events: list[WireEvent] = field(default_factory=list[WireEvent])

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, amount: int, channel: str = "") -> Handle:
        """Note a start; returns what waits for it."""
        self.wires.append(
            RehearsedWire(kind, ranks, amount, str(x.dtype).removeprefix("torch."), channel, self.findings.at)
        )
        number = len(self.wires) - 1
        self.events.append(WireEvent(False, number))
        return Handle(self, number)


@dataclass(frozen=True, slots=True)
class Handle:
    """Of what has been started."""

    log: WireLog
    number: int

    def wait(self) -> None:
        """Note a wait."""
        self.log.events.append(WireEvent(True, self.number))


@dataclass(slots=True)
class RehearsedComm:
    """`Comm` of a rank alone. `groups.made` has the groups that `open` would make."""

    rank: int
    log: WireLog
    groups: ProcessGroups = field(default_factory=ProcessGroups)

    def open(self, p: Program) -> None:
        """Go through the rounds in which a run makes its groups."""
        for own, channel in self.groups.own_groups(needed(p), lambda: self.rank):
            if len(own) > 1:
                self.groups.made[own, channel] = None

    def share(self, size: int, rounds: Sequence[Round], memory: PeerMemory) -> None:
        """Registers of no device are read by nobody."""

    def _within(self, kind: str, ranks: Ranks, channel: Channel = "") -> None:
        """A group that is used must have been made, with this rank in it."""
        if (ranks, channel) not in self.groups.made:
            name = f"{channel} messages of " if channel else ""
            self.log.findings.add("GROUP", f"{kind} over {name}{shown(ranks)}, a group that no round makes",
                                  once=f"{ranks} {channel}")  # fmt: skip

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Note a collective."""
        if kind not in KINDS:
            raise ValueError(f"no collective named {kind}")
        self._within(kind, ranks)
        self._check_shares(kind, ranks, x, y)
        if kind == "shift":
            return self._shift(ranks, x, y)
        if kind == "all_reduce" and attrs.get("reduce") == "max":
            return Work([self.log.start("all_reduce (max)", ranks, x, x.nbytes)], (x, y))
        amount = y.nbytes if kind == "all_gather" else x.nbytes
        return Work([self.log.start(kind, ranks, x, amount)], (x, y))

    def _check_shares(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor) -> None:
        """As torch.distributed checks what it is given."""
        n, m = x.numel(), y.numel()
        fits = {"all_gather": n * len(ranks) == m, "reduce_scatter": m * len(ranks) == n}.get(kind, n == m)
        even = kind != "all_to_all" or x.shape[0] % len(ranks) == 0
        if x.dtype != y.dtype or not fits or not even:
            self.log.findings.add(
                "SHARES", f"{kind} over {len(ranks)} ranks of {list(x.shape)} {x.dtype} into {list(y.shape)} {y.dtype}"
            )

    def _shift(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor) -> Work:
        me = ranks.index(self.rank)
        ends = (self.rank, ranks[(me + 1) % len(ranks)]), (ranks[me - 1], self.rank)
        handles = [self.log.start(kind, pair, t, t.nbytes, "shift")
                   for kind, pair, t in zip(("send", "recv"), ends, (x, y), strict=True)]  # fmt: skip
        return Work(handles, (x, y))

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        """Note an all-to-all of rows, which must be as many as tensors have."""
        self._within("all_to_all_v", ranks)
        if (sum(send), sum(receive)) != (len(x), len(y)):
            self.log.findings.add("SHARES", f"all_to_all_v sends {sum(send)} of {len(x)} rows into {len(y)}")
        return Work([self.log.start("all_to_all_v", ranks, x, x.nbytes)], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """Note an all-reduce."""
        return self._all_reduce("all_reduce", ranks, x)

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """Note an all-reduce (max)."""
        return self._all_reduce("all_reduce (max)", ranks, x)

    def _all_reduce(self, kind: str, ranks: Ranks, x: torch.Tensor) -> Work | None:
        if len(ranks) == 1:
            return None
        self._within(kind, ranks)
        return Work([self.log.start(kind, ranks, x, x.nbytes)], (x,))

    def finish(self, work: Work | None) -> None:
        """Note the waits."""
        for handle in work.waits if work is not None else ():
            handle.wait()

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Channel) -> Work:
        """Note a send of a pipeline of `ranks`."""
        self._within("a send", ranks, what)
        return Work([self.log.start("send", (self.rank, to), x, x.nbytes, what)], (x,))

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Channel) -> Work:
        """Note a receive."""
        self._within("a receive", ranks, what)
        return Work([self.log.start("recv", (of, self.rank), x, x.nbytes, what)], (x,))


class RehearsedDevice(Meta):
    """A device without numbers, whose copies to and from the host are written down."""

    behind: ClassVar[bool] = False

    def __init__(self, log: WireLog) -> None:
        self.log = log

    def comm(self, rank: int, journal: Journal | None = None, limit: float = 600.0) -> Comm:
        """The communicator that writes into the same log."""
        return RehearsedComm(rank, self.log)

    def copy(self, x: torch.Tensor, y: torch.Tensor) -> Work:
        """Note a copy."""
        y.copy_(x)
        return Work((self.log.start("copy", (), x, y.nbytes),), (x, y))


def shown(ranks: Ranks) -> str:
    """The ranks of a group, shortened: `{0,8,16,…,4088: 512 ranks}`."""
    if len(ranks) <= 8:
        return f"{{{','.join(map(str, ranks))}}}"
    return f"{{{','.join(map(str, ranks[:3]))},…,{ranks[-1]}: {len(ranks)} ranks}}"
