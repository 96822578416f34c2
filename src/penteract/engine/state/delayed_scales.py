"""The state of delayed FP8 scaling: the amax (largest absolute value) of each linear layer's x, w and gradient, over
the last steps. A step casts by scales of the steps before it, so nothing waits for its own values.

Micikevicius 2022 (2209.05433) §4.2. All of it stays on the device, at fixed addresses, so a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class AmaxHistory:
    """fp32, of n linear layers (`names`, by weight); the last dim is x, w, gradient. H = `length`.

    steps      [H, n, 3]: amax of the last H steps, newest first
    past_amax  [n, 3]: the largest of them
    amax       [n, 3]: of this step so far; kernels raise it
    """

    names: Sequence[str]
    length: int
    device: torch.device
    steps: torch.Tensor = field(init=False)
    past_amax: torch.Tensor = field(init=False)
    amax: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.names), 3)
        self.steps = torch.zeros(self.length, *shape, device=self.device)
        self.past_amax, self.amax = (torch.zeros(shape, device=self.device) for _ in range(2))

    def begin(self) -> None:
        """Compute `past_amax` from the history, and reset `amax`."""
        torch.amax(self.steps, 0, out=self.past_amax)
        self.amax.zero_()

    def end(self, squared_norm: torch.Tensor) -> None:
        """Append `amax`, which ranks have agreed on, to the history. A step whose gradient norm is not finite is left
        out: its update is skipped, and its values may be as wrong as its gradients."""
        finite = squared_norm.isfinite()  # stays on the device: a branch would make the host wait
        for i in range(self.length - 1, 0, -1):
            self.steps[i].copy_(torch.where(finite, self.steps[i - 1], self.steps[i]))
        self.steps[0].copy_(torch.where(finite, self.amax.nan_to_num_(0.0, 0.0, 0.0), self.steps[0]))

    def by_name(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows [3] (x, w, gradient) of `past_amax` or `amax`, by the name of the weight."""
        return dict(zip(self.names, table.unbind(), strict=True))
