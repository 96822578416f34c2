"""AdamW on flat buckets, with the global norm clipped on the device, and routers' biases moved.

Loshchilov 2017 (1711.05101), decoupled decay; Wang 2024 (2408.15664) for the bias that balances without a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penteract.engine.state import Flat, State
from penteract.spec.run import Optimizer
from penteract.step.program import Program


@dataclass(slots=True)
class AdamW:
    """Rate and step are device tensors, so that a captured step needs nothing from the host."""

    spec: Optimizer
    device: torch.device
    rate: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        self.step = torch.ones((), dtype=torch.float64, device=self.device)  # the one now taken, from 1

    def update(self, flat: Flat, squared_norm: torch.Tensor) -> None:
        """One step of a shard's parameters, in place but for one temporary of its size.

        Where the norm is not finite, on the device: the gradient counts as zero and every factor as one, so that
        parameters and moments stay what they were.
        """
        s, g = self.spec, flat.own_gradient
        dtype = g.dtype
        good = squared_norm.isfinite().to(dtype)
        g.nan_to_num_(0.0, 0.0, 0.0).mul_(self.clipping(squared_norm).nan_to_num(0.0))
        b1, b2 = s.betas
        flat.mean.lerp_(g, good * (1 - b1))
        flat.square.mul_(1 - good * (1 - b2)).addcmul_(g, g, value=1 - b2)
        bias1, bias2 = 1 - b1**self.step, 1 - b2**self.step
        divisor = flat.square.sqrt().div_(bias2.sqrt().to(dtype)).add_(s.epsilon)
        if flat.bucket.decay:
            flat.master.mul_(1 - good * (self.rate * s.weight_decay).to(dtype))
        flat.master.sub_(torch.div(flat.mean, divisor, out=divisor).mul_(good * (self.rate / bias1).to(dtype)))
        flat.follow()

    def clipping(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied with, [], at most one."""
        if not self.spec.clip_norm:
            return torch.ones_like(squared_norm)
        return (self.spec.clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1)

    def end(self, p: Program, state: State) -> None:
        """Experts chosen less than the mean get a larger bias, by one fixed step."""
        if p.model.moe is None:
            return
        for name, tally in state.tallies.items():
            chosen = tally.to(state.biases[name].dtype)
            state.biases[name].add_((chosen.mean() - chosen).sign_().mul_(p.model.moe.bias_rate))
