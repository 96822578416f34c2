"""AdamW on flat buckets, with the global norm clipped on the device, and routers' biases moved.

Loshchilov 2017 (1711.05101), decoupled decay; Wang 2024 (2408.15664) for the bias that balances without a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.run import Optimizer
from penteract.engine.executor.state import Flat, TrainingState
from penteract.engine.optim.loss_scaling import LossScale
from penteract.engine.optim.stochastic_rounding import chances, round_into
from penteract.step.program import Program
from penteract.step.update import SLICE


class Factors(NamedTuple):
    """What one step does alike to all elements: [] each, on the device, as updates are computed; views of one vector,
    in this order.

    good      1; 0 where the norm is not finite: then the others leave everything as it was
    gradient  clipping, with the loss's scale taken out
    mean      weight of the gradient in the first average
    square    what stays of the second average
    root      by which its root is divided: of its bias correction
    decay     what stays of a parameter that decays
    rate      bias correction of the first average included
    """

    good: torch.Tensor
    gradient: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    root: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


Move = Callable[[Flat, Factors, torch.Tensor], None]  # a shard, and the step, from 1: [], on the device


@dataclass(slots=True)
class AdamW:
    """Rate and step are device tensors, so that a captured step needs nothing from the host.

    `seed` decides how parameters without a master are rounded. `scaling`: of the loss, or None. `kernel` moves a shard
    in one pass, in place of torch.
    """

    spec: Optimizer
    device: torch.device
    seed: int = 0
    scaling: LossScale | None = None
    kernel: Move | None = None
    rate: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        self.step = torch.ones((), dtype=torch.float64, device=self.device)  # the one now taken, from 1

    def update(self, flat: Flat, factors: Factors) -> None:
        """One step of a shard's parameters, in place but for one temporary of its size; what is narrower than the
        update is widened by slices. A kernel needs neither."""
        if self.kernel is not None:
            return self.kernel(flat, factors, self.step)
        whole = len(flat.master)
        size = SLICE if flat.sliced else max(1, whole)
        for at in range(0, whole, size):
            self._move(flat, slice(at, min(at + size, whole)), factors)
        return flat.follow()

    def factors(self, squared_norm: torch.Tensor) -> Factors:
        """Of this step, for all shards. Where the norm is not finite, on the device: the gradient counts as zero and
        every factor as one, so that parameters and moments stay what they were."""
        s, dtype = self.spec, squared_norm.dtype
        b1, b2 = s.betas
        good = squared_norm.isfinite().to(dtype)
        taken = self.step if self.scaling is None else self.step - self.scaling.skipped
        bias1, bias2 = 1 - b1**taken, 1 - b2**taken
        every = torch.stack((
            good, self._factor(squared_norm), good * (1 - b1), 1 - good * (1 - b2), bias2.sqrt().to(dtype),
            1 - good * (self.rate * s.weight_decay).to(dtype), good * (self.rate / bias1).to(dtype),
        ))  # fmt: skip
        return Factors(*every.unbind())

    def _move(self, flat: Flat, part: slice, factors: Factors) -> None:
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
        master = flat.master[part].to(dtype)
        if flat.bucket.decay:
            master.mul_(factors.decay)
        master.sub_(quotient.mul_(factors.rate))
        del quotient
        self._put(flat, part, master)

    def _put(self, flat: Flat, part: slice, moved: torch.Tensor) -> None:
        """The moved elements of a slice back to where they are kept: they are there already, unless they are wider."""
        kept = flat.master[part]
        if kept.dtype == moved.dtype:
            return
        if flat.parameter_slices:
            round_into(kept, moved, chances(flat.parameter_slices, part, self.seed, self.step))
        else:
            kept.copy_(moved)

    def clipping(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied with so that their norm is small enough, [], at most one."""
        if not self.spec.clip_norm:
            return torch.ones_like(squared_norm)
        return (self.spec.clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1)

    def _factor(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """Clipping, with the loss's scale taken out; zero where the norm is not finite."""
        clipping = self.clipping(squared_norm).where(squared_norm.isfinite(), 0)
        return clipping if self.scaling is None else clipping / self.scaling.used

    def end(self, p: Program, state: TrainingState, squared_norm: torch.Tensor) -> None:
        """Experts chosen less than the mean get a larger bias, by one fixed step; the loss's scale follows."""
        good = squared_norm.isfinite()
        if p.model.moe is not None:
            for name, counted in state.tokens_per_expert.items():
                chosen = counted.to(state.biases[name].dtype)
                state.biases[name].add_((chosen.mean() - chosen).sign_().mul_(p.model.moe.bias_rate).mul_(good))
        if self.scaling is not None:
            self.scaling.end(squared_norm)
