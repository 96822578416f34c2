"""Numbers that are zero when a step first asks for them, cleared all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_APART = 4  # numbers of fp32 from one to the next: addresses are multiples of 16 bytes


@dataclass(slots=True)
class Zeros:
    """One number after the other, each [1] in fp32. A step that begins after others clears as many as any has asked
    for; each beyond is made by itself. As steps are alike, each asks for the same memory in the same order.
    """

    table: torch.Tensor | None = field(default=None, init=False)  # [numbers, _APART]
    numbers: list[torch.Tensor] = field(default_factory=list[torch.Tensor], init=False)
    device: torch.device | None = field(default=None, init=False)  # of those that were made
    used: int = field(default=0, init=False)

    def begin(self) -> None:
        """All are zero again."""
        if self.used > len(self.numbers):
            self.table = torch.zeros(self.used, _APART, dtype=torch.float32, device=self.device)
            self.numbers = [row[:1] for row in self.table]
        elif self.table is not None:
            self.table.zero_()
        self.used = 0

    def next(self, device: torch.device) -> torch.Tensor:
        """A zero [1] that nothing else of this step has."""
        self.used += 1
        if self.used <= len(self.numbers):
            return self.numbers[self.used - 1]
        self.device = device
        return torch.zeros(1, dtype=torch.float32, device=device)
