"""Memory of a rank that the ranks of its host can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penteract.engine.comm.comm import Ranks, Waitable


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """The blocks of a group's ranks, in its order, as this rank reads them.

    meet    returns once all ranks of the group have called it; on a GPU, for what follows in the current stream
    beside  does work beside compute, ordered after everything computed so far and after earlier work of the group.
            -> what waits for it
    """

    blocks: Sequence[torch.Tensor]  # bytes
    me: int
    meet: Callable[[], Any]
    beside: Callable[[Callable[[], None]], Waitable]


class PeerMemory(Protocol):
    """Makes blocks that other ranks read, and opens theirs."""

    def block(self, size: int) -> torch.Tensor:
        """[size] bytes on this rank's device."""
        ...

    def open(self, block: torch.Tensor, ranks: Ranks, group: Any) -> PeerBlocks:
        """The blocks of `ranks`, of equal size. Called by all of them, in the same order of groups. `group`: a process
        group of theirs that nothing else uses."""
        ...
