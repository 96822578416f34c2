"""What ranks add up at the end of a step, in one vector: the norm and the losses, and the next step's targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.device import device_of
from penteract.step.agreements import BITS, DIGITS, digits, reports_targets, totals
from penteract.step.program import Program


@dataclass(slots=True)
class Totals:
    """`vector` is summed over the world; the others are views of it.

    numbers  squared gradient norm, the loss terms, ranks that were asked to stop
    digits   of the next step's targets, for each term of the loss that is a mean over them
    ahead    tells the targets of this rank's next batch, or None where it cannot be drawn: then all ranks are asked to
             stop; None: there is none, or none is known
    """

    p: Program
    device: torch.device
    vector: torch.Tensor = field(init=False)
    numbers: torch.Tensor = field(init=False)
    digits: torch.Tensor = field(init=False)
    ahead: Callable[[], Sequence[int] | None] | None = None
    _worth: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size, n = totals(self.p).elements, 2 + len(self.p.losses)
        self.vector = torch.zeros(size, dtype=dtype_of("stat", self.p.precision), device=self.device)
        self.numbers, self.digits = self.vector[:n], self.vector[n:].view(-1, DIGITS)
        self._worth = torch.tensor([1 << BITS * i for i in range(DIGITS)], device=self.device)

    def begin(self, stop: torch.Tensor) -> None:
        """Zero the totals; `stop`: nonzero where this rank asks for an end."""
        self.vector.zero_()
        self.numbers[-1].copy_(stop)

    def look_ahead(self) -> None:
        """Put the next step's targets among the totals. The host has time for them now: the device is behind."""
        if self.ahead is None:
            return
        counts = self.ahead()
        if counts is None:
            self.numbers[-1].add_(1)  # in the middle of a step no other rank would hear of it
        elif reports_targets(self.p.mesh, self.p.rank):
            told = torch.tensor([digits(n) for n in counts], dtype=self.digits.dtype)
            self.digits.copy_(device_of(self.device).staged(told), non_blocking=True)

    def told(self, counts: torch.Tensor) -> None:
        """Once all ranks have summed: the next step's targets."""
        if self.ahead is not None:
            counts.copy_((self.digits.to(torch.int64) * self._worth).sum(-1))
