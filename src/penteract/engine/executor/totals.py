"""The vector that ranks sum at the end of a step: gradient norm, losses, and the next step's target counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.device.device import device_of
from penteract.engine.dtypes import dtype_of
from penteract.step.all_reduces import BITS, DIGITS, digits, reports_targets, totals
from penteract.step.program import Program


@dataclass(slots=True)
class Totals:
    """`vector` is summed over the world; the others are views of it.

    numbers  squared gradient norm, the loss terms, ranks that were asked to stop
    digits   of the next step's target counts, for each term of the loss that is a mean over targets

    `next_targets` prefetches this rank's next batch and returns its target counts, or None if that fails: then all
    ranks are asked to stop. `next_targets` is None if no batch is prefetched.
    """

    p: Program
    device: torch.device
    vector: torch.Tensor = field(init=False)
    numbers: torch.Tensor = field(init=False)
    digits: torch.Tensor = field(init=False)
    next_targets: Callable[[], Sequence[int] | None] | None = None
    _place_values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size, n = totals(self.p).elements, 2 + len(self.p.losses)
        self.vector = torch.zeros(size, dtype=dtype_of("stat", self.p.precision), device=self.device)
        self.numbers, self.digits = self.vector[:n], self.vector[n:].view(-1, DIGITS)
        self._place_values = torch.tensor([1 << BITS * i for i in range(DIGITS)], device=self.device)

    def begin(self, stop: torch.Tensor) -> None:
        """Zero the totals; `stop`: nonzero if this rank was asked to stop."""
        self.vector.zero_()
        self.numbers[-1].copy_(stop)

    def add_next_targets(self) -> None:
        """Put the next step's target counts into the vector. The host prefetches the batch now, while the device
        works."""
        if self.next_targets is None:
            return
        counts = self.next_targets()
        if counts is None:
            self.numbers[-1].add_(1)  # an error raised in the middle of a step would leave the other ranks waiting
        elif reports_targets(self.p.mesh, self.p.rank):
            rows = torch.tensor([digits(n) for n in counts], dtype=self.digits.dtype)
            self.digits.copy_(device_of(self.device).pin(rows), non_blocking=True)

    def read_next_targets(self, counts: torch.Tensor) -> None:
        """After the sum over ranks: copy the next step's target counts into `counts`."""
        if self.next_targets is not None:
            counts.copy_((self.digits.to(torch.int64) * self._place_values).sum(-1))
