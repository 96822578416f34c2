"""What a step has come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a step, on the host: `loss` is the cross entropy; `auxiliary_losses` are the other terms, each
    times its coefficient; `norm` is the gradient's."""

    loss: float
    auxiliary_losses: Mapping[str, float]
    norm: float
    stop: bool  # a rank was asked to stop
    loss_scale: float = 0.0  # of this step; 0: loss scaling is off
    damaged: bool = False  # state of a rank is not what it should be; told apart where the loss is scaled

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because of an overflow. Without loss scaling an overflow ends the run."""
        return self.loss_scale > 1 and not math.isfinite(self.norm) and not self.damaged

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient's norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)
