"""The communicator of a rank: asynchronous collectives and point-to-point messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penteract.engine.comm.journal import Entry
from penteract.schedule.actions import Payload
from penteract.step.program import Program

Ranks = tuple[int, ...]


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


class Comm(Protocol):
    """One rank's communicator. `ranks`: the ranks of a group in its order, this rank among them.

    NCCL and gloo are in `distributed.py`; `fake.py` has one that needs no peers.
    """

    rank: int

    def open(self, p: Program) -> None:
        """Make the process groups of a program, and connect them where the first use would block the host. Called by
        all ranks of the world, before the first step."""
        ...

    def share(self, size: int, p: Program) -> torch.Tensor | None:
        """[size] bytes for the registers of p, which ranks of this host may read to do its collectives. None: they do
        not. Called by all ranks of the world, after `open`."""
        ...

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Start a collective of equal shares, one of `ops.collectives.KINDS`, from x into y. Raises ValueError for an
        unknown kind. `attrs`: "reduce" may be "max"."""
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
