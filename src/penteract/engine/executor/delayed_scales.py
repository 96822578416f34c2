"""What delayed scales are made of: the largest values of the last steps, of each linear's x, w and gradient.

Micikevicius 2022 (2209.05433) §4.2. It all stays on the device, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class History:
    """`steps` [H, n, 3], the newest first; `past` [n, 3], the largest of them; `seen` [n, 3], this step's so far."""

    names: Sequence[str]
    length: int
    device: torch.device
    steps: torch.Tensor = field(init=False)
    past: torch.Tensor = field(init=False)
    seen: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.names), 3)
        self.steps = torch.zeros(self.length, *shape, device=self.device)
        self.past, self.seen = (torch.zeros(shape, device=self.device) for _ in range(2))

    def begin(self) -> None:
        """Take the largest values of the steps that are remembered, [names, 3], and begin to look anew."""
        torch.amax(self.steps, 0, out=self.past)
        self.seen.zero_()

    def end(self, squared_norm: torch.Tensor) -> None:
        """`seen`, agreed on, is the newest. A step whose norm is not finite leaves no trace: its update is skipped, and
        what it saw may be as wrong as its gradients."""
        good = squared_norm.isfinite()
        for i in range(self.length - 1, 0, -1):
            self.steps[i].copy_(torch.where(good, self.steps[i - 1], self.steps[i]))
        self.steps[0].copy_(torch.where(good, self.seen.nan_to_num_(0.0, 0.0, 0.0), self.steps[0]))

    def by_name(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of `past` or `seen`, [3]."""
        return dict(zip(self.names, table.unbind(), strict=True))
