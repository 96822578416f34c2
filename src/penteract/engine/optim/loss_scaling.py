"""Loss scaling for fp16, wholly on the device: the loss times a scale, small gradients kept, overflows skipped.

Micikevicius 2018 (1710.03740) §3.2. The gradient's norm is summed over all ranks, so all see an overflow on any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LARGEST = 2.0**32


@dataclass(slots=True)
class LossScale:
    """`values` [3] is all that is kept between steps: the scale, steps since it changed, updates skipped so far.

    `used` [] is the scale of the step now taken, or the last one that was.
    """

    first: float
    growth_every: int
    device: torch.device
    values: torch.Tensor = field(init=False)
    used: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = torch.tensor([self.first, 0, 0], dtype=torch.float64, device=self.device)
        self.used = torch.ones((), dtype=torch.float32, device=self.device)

    @property
    def skipped(self) -> torch.Tensor:
        """Updates left out after an overflow since the run began: [], fp64."""
        return self.values[2]

    def begin(self) -> None:
        """Take the scale of this step: losses are multiplied by `used` from here on."""
        self.used.copy_(self.values[0])

    def unscale(self, squared_norm: torch.Tensor) -> None:
        """In place; what is not finite stays so."""
        squared_norm.div_(self.used).div_(self.used)

    def end(self, squared_norm: torch.Tensor) -> None:
        """Half the scale after an overflow, twice after enough steps without one.

        At a scale of one or less an overflow is no fault of the scale: the run ends there, and nothing is moved.
        """
        scale, steps, skipped = self.values.unbind()
        good = squared_norm.isfinite()
        halved = ~good & (scale > 1)
        steps.add_(good).mul_(~halved)
        grown = good & (steps >= self.growth_every)
        scale.mul_(1 + grown.to(scale.dtype) - 0.5 * halved.to(scale.dtype)).clamp_(max=LARGEST)
        steps.mul_(~grown)
        skipped.add_(halved)
