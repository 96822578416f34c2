"""The communicator of a rank: asynchronous collectives and point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from penteract.engine.comm.journal import Entry
from penteract.schedule.actions import Payload
from penteract.step.program import Program

Ranks = tuple[int, ...]
# The pipeline has a process group for each direction: values go to the next stage, gradients to the previous one. So a
# message never waits for one of the other direction. Collectives that read directly have groups of their own, as they
# run beside the library's.
Channel = Payload | Literal["", "direct"]


class Round(NamedTuple):
    """Disjoint groups of ranks. All ranks have the same rounds; each rank makes the group that it is in."""

    groups: tuple[Ranks, ...]
    channel: Channel = ""


class Waitable(Protocol):
    """The handle of an operation under way, as torch.distributed returns it."""

    def wait(self) -> Any:
        """Wait until it is done; on a GPU, make the current stream wait."""
        ...


@dataclass(slots=True)
class Work:
    """A collective, a message or a copy under way. It keeps its buffers alive. `entry`: its note in the journal."""

    waits: Sequence[Any]  # `Waitable`s; torch types its handles as optional, for calls that block
    pinned: tuple[torch.Tensor, ...]
    entry: Entry | None = None


class PeerBlocks(NamedTuple):
    """The blocks of a group's ranks, in its order, as this rank reads them.

    meet        returns once all ranks of the group have called it; on a GPU, for what follows in the current stream
    start_work  does work beside compute, ordered after everything computed so far and after earlier work of the group.
                -> what waits for it
    """

    blocks: Sequence[torch.Tensor]  # bytes
    me: int
    meet: Callable[[], Any]
    start_work: Callable[[Callable[[], None]], Waitable]


class PeerMemory(Protocol):
    """Makes blocks of memory that other ranks of the host read, and opens theirs (`engine/comm/direct/`)."""

    def block(self, size: int) -> torch.Tensor:
        """[size] bytes on this rank's device."""
        ...

    def open(self, block: torch.Tensor, ranks: Ranks, group: Any, number: int) -> PeerBlocks:
        """The blocks of `ranks`, of equal size. Called by all of them, in the same order of groups. `group`: a process
        group of theirs that nothing else uses. `number`: of it among those that read a block."""
        ...

    def settle(self) -> None:
        """This rank has opened all blocks that it reads, and others have opened its own."""
        ...


class Comm(Protocol):
    """One rank's communicator. `ranks`: the ranks of a group in its order, this rank among them.

    NCCL and gloo are in `distributed.py`; `fake.py` has one that needs no peers.
    """

    rank: int

    def open(self, p: Program) -> None:
        """Make the process groups of a program, and connect them where the first use would block the host. Called by
        all ranks of the world, before the first step."""
        ...

    def share(self, size: int, rounds: Sequence[Round], memory: PeerMemory) -> torch.Tensor | None:
        """[size] bytes of `memory`, which the groups of `rounds` read to do collectives of what lies in them; None if
        there are no groups. Called by all ranks of the world, after `open`."""
        ...

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Start a collective of equal shares, one of `ops.collectives.KINDS`, from x into y. Raises ValueError for an
        unknown kind. `attrs`: "reduce" may be "max"; with "only_others", nobody reads the share that this rank would
        send to itself."""
        ...

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        ...

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (sum) x over `ranks`, in place; None with one rank."""
        ...

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """All-reduce (max) x over `ranks`, in place; None with one rank."""
        ...

    def finish(self, work: Work | None) -> None:
        """Wait; on a GPU, make the current stream wait."""
        ...

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Payload) -> Work:
        """Post a send of a pipeline of `ranks`."""
        ...

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Payload) -> Work:
        """Post the matching receive."""
        ...


def all_reduce_max(comm: Comm, p: Program, axis: str, x: torch.Tensor) -> None:
    """The max all-reduce that kernels call, in place. Not a method of who calls kernels: what these are given would
    then refer to what holds it, and the cycle would be freed late."""
    comm.finish(comm.largest(p.mesh.group(axis, p.rank), x))
