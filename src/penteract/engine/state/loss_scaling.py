"""Dynamic loss scaling for fp16, wholly on the device. The loss is scaled so that small gradients do not underflow;
steps that overflow are skipped.

Micikevicius 2018 (1710.03740) §3.2. The gradient's norm is summed over all ranks, so an overflow on one is seen by all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LARGEST = 2.0**32


@dataclass(slots=True)
class LossScale:
    """`values` [3] is the state between steps: the scale, steps since it changed, updates skipped so far.

    `used` [] is the scale of the current step, or between steps that of the last one. `held` []: 0, or NaN in a step
    that is not finite for another reason than its scale: then the state stays as it is.
    """

    first: float
    growth_every: int
    device: torch.device
    values: torch.Tensor = field(init=False)
    used: torch.Tensor = field(init=False)
    held: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = torch.tensor([self.first, 0, 0], dtype=torch.float64, device=self.device)
        self.used, self.held = (make((), dtype=torch.float32, device=self.device) for make in (torch.ones, torch.zeros))

    @property
    def skipped(self) -> torch.Tensor:
        """Updates skipped because of an overflow since the run began: [], fp64."""
        return self.values[2]

    def begin(self) -> None:
        """Set `used` to the current scale: losses of this step are multiplied by it."""
        self.used.copy_(self.values[0])

    def unscale(self, squared_norm: torch.Tensor) -> None:
        """Divide the squared norm by the squared scale, in place; values that are not finite stay so."""
        squared_norm.div_(self.used).div_(self.used)

    def hold(self, hindrance: torch.Tensor, squared_norm: torch.Tensor) -> torch.Tensor:
        """-> `held` of this step. `hindrance`: 0, or NaN if the step must change nothing. At a scale of one or less an
        overflow is not caused by the scale, and counts as such."""
        overflow = ~squared_norm.isfinite() & (self.used <= 1)
        return self.held.copy_(hindrance).masked_fill_(overflow, torch.nan)

    def end(self, squared_norm: torch.Tensor) -> None:
        """Halve the scale after an overflow; double it after `growth_every` steps without one."""
        scale, steps, skipped = self.values.unbind()
        free = self.held.isfinite()
        good = squared_norm.isfinite() & free
        halved = ~squared_norm.isfinite() & free
        steps.add_(good).mul_(~halved)
        grown = good & (steps >= self.growth_every)
        scale.mul_(1 + grown.to(scale.dtype) - 0.5 * halved.to(scale.dtype)).clamp_(max=LARGEST)
        steps.mul_(~grown)
        skipped.add_(halved)
