"""AdamW on flat buckets, with clipping of the global norm on the device, and the update of routers' biases.

Loshchilov 2017 (1711.05101), decoupled decay; Wang 2024 (2408.15664), load balancing by a bias without a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.run import Optimizer
from penteract.engine.state.loss_scaling import LossScale
from penteract.engine.state.state import Flat, TrainingState
from penteract.engine.state.stochastic_rounding import random_bits, round_into
from penteract.step.program import Program
from penteract.step.update import SLICE, parts


class Factors(NamedTuple):
    """Factors of one step that are the same for all elements: [] each, on the device, in the dtype of the update; views
    of one vector, in this order.

    good      1; 0 if the norm is not finite: then the other factors leave everything unchanged
    gradient  clipping factor, divided by the loss scale
    mean      weight of the gradient in the first moment (1 - beta1)
    square    factor of the old second moment (beta2)
    root      divisor of the second moment's root (its bias correction)
    decay     factor of a parameter with weight decay
    rate      learning rate with the bias correction of the first moment
    """

    good: torch.Tensor
    gradient: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    root: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


# A shard; the step, from 1: [], on the device; and `AdamW.nonfinite`.
UpdateShard = Callable[[Flat, Factors, torch.Tensor, torch.Tensor], None]


@dataclass(slots=True)
class AdamW:
    """Rate and step are device tensors, so that a captured step needs nothing from the host.

    `seed`: of stochastic rounding, for parameters without master weights. `scaling`: of the loss, or None. `kernel`: a
    fused update of a shard, used instead of torch ops.
    """

    spec: Optimizer
    device: torch.device
    seed: int = 0
    scaling: LossScale | None = None
    kernel: UpdateShard | None = None
    rate: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)
    nonfinite: torch.Tensor = field(init=False)  # []: 0, or NaN once a new master weight was not finite

    def __post_init__(self) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        self.step = torch.ones((), dtype=torch.float64, device=self.device)  # the current one, from 1
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=self.device)

    def update(self, flat: Flat, factors: Factors) -> None:
        """Update a shard's parameters in place, with one temporary of the shard's size; state narrower than the update
        is widened slice by slice. The fused kernel needs neither."""
        if self.kernel is not None:
            return self.kernel(flat, factors, self.step, self.nonfinite)
        whole = len(flat.master)
        for part in parts(whole, SLICE if flat.sliced else max(1, whole)):
            self._update_slice(flat, part, factors)
        return flat.copy_from_master()

    def factors(self, squared_norm: torch.Tensor) -> Factors:
        """The factors of this step, for all shards, computed on the device. If the norm is not finite, the gradient
        counts as zero and every factor as one, so parameters and moments do not change."""
        s, dtype = self.spec, squared_norm.dtype
        b1, b2 = s.betas
        good = squared_norm.isfinite().to(dtype)
        updates = self.step if self.scaling is None else self.step - self.scaling.skipped
        bias1, bias2 = 1 - b1**updates, 1 - b2**updates
        factors = torch.stack((
            good, self._factor(squared_norm), good * (1 - b1), 1 - good * (1 - b2), bias2.sqrt().to(dtype),
            1 - good * (self.rate * s.weight_decay).to(dtype), good * (self.rate / bias1).to(dtype),
        ))  # fmt: skip
        return Factors(*factors.unbind())

    def _update_slice(self, flat: Flat, part: slice, factors: Factors) -> None:
        dtype, gain = factors.good.dtype, 1 - self.spec.betas[1]
        g = flat.own_gradient[part].to(dtype)
        g.nan_to_num_(0.0, 0.0, 0.0).mul_(factors.gradient)
        mean = flat.read("mean", part, dtype).lerp_(g, factors.mean)
        square = flat.read("square", part, dtype).mul_(factors.square).addcmul_(g, g, value=gain)
        del g
        quotient = square.sqrt().div_(factors.root).add_(self.spec.epsilon)
        torch.div(mean, quotient, out=quotient)
        flat.write("mean", part, mean)
        flat.write("square", part, square)
        del mean, square
        master = flat.read("master", part, dtype)
        if flat.bucket.decay:
            master.mul_(factors.decay)
        master.sub_(quotient.mul_(factors.rate))
        del quotient
        self._put(flat, part, master)

    def _put(self, flat: Flat, part: slice, updated: torch.Tensor) -> None:
        """Write the updated master weights of a slice, split or rounded. If dtypes are equal, they were updated in
        place. A moment that is not finite shows in them, too, but for a second moment that is infinite: it divides the
        step, so its weight stands still, but for decay. Arithmetic makes none, as the norm of gradients is finite; a
        flipped bit can, for which there is `executor/state_check.py`."""
        self.nonfinite.add_(updated.sum(), alpha=0)  # 0 times what is not finite is NaN
        kept = flat.master[part]
        if flat.splits_master:
            flat.write("master", part, updated)
            return
        if kept.dtype == updated.dtype:
            return
        if flat.parameter_slices:
            round_into(kept, updated, random_bits(flat.parameter_slices, part, self.seed, self.step))
        else:
            kept.copy_(updated)

    def clipping(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """The factor, at most one, that brings the gradient norm down to `clip_norm`: []."""
        if not self.spec.clip_norm:
            return torch.ones_like(squared_norm)
        return (self.spec.clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1)

    def _factor(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """The clipping factor divided by the loss scale; zero if the norm is not finite."""
        clipping = self.clipping(squared_norm).where(squared_norm.isfinite(), 0)
        return clipping if self.scaling is None else clipping / self.scaling.used

    def end(self, p: Program, state: TrainingState, squared_norm: torch.Tensor) -> None:
        """Update routers' biases, then the loss scale. Experts chosen less than the mean get a larger bias, the others
        a smaller one, by a fixed step."""
        if state.tokens_per_expert and p.model.moe is not None:
            good = squared_norm.isfinite()
            for name, counted in state.tokens_per_expert.items():
                chosen = counted.to(state.biases[name].dtype)
                state.biases[name].add_((chosen.mean() - chosen).sign_().mul_(p.model.moe.bias_rate).mul_(good))
        if self.scaling is not None:
            self.scaling.end(squared_norm)
