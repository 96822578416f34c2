"""What a rank asks of the others: collectives and messages that are put on the wire and waited for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penteract.schedule.actions import Payload
from penteract.step.program import Program

Ranks = tuple[int, ...]


class Waitable(Protocol):
    """What is under way; as torch.distributed hands it out."""

    def wait(self) -> Any:
        """Wait until it is done; on a GPU, let the stream wait."""
        ...


@dataclass(slots=True)
class Work:
    """A collective, a message or a copy under way. It pins its buffers."""

    waits: Sequence[Any]  # `Waitable`s; torch has its handles as optional, for calls that block
    pinned: tuple[torch.Tensor, ...]


class Comm(Protocol):
    """One rank's lines to the others. `ranks` name a group in its order, and this rank is one of them.

    NCCL and gloo are in `distributed.py`; `fake.py` has one that needs no peers.
    """

    rank: int

    def open(self, p: Program) -> None:
        """Make the groups that a program's ranks talk in, and connect them where the first use would make the host
        wait. By all ranks of the world, before the first step."""
        ...

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        """Begin a collective of equal shares, one of `ops.collectives.KINDS`, from x into y. ValueError where there is
        none of this name. `attrs`: "reduce" may be "max"."""
        ...

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        ...

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """Sum x over `ranks`, in place; nothing over one."""
        ...

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        """The largest of each number of x over `ranks`, in place; nothing over one."""
        ...

    def finish(self, work: Work | None) -> None:
        """Wait; on a GPU: let the stream wait."""
        ...

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Payload) -> Work:
        """Post a message of a pipeline of `ranks`."""
        ...

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Payload) -> Work:
        """Post the other half of a message."""
        ...
