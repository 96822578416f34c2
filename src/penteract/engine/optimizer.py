"""AdamW on flat buckets, with the global norm clipped on the device, and routers' biases moved.

Loshchilov 2017 (1711.05101), decoupled decay; Wang 2024 (2408.15664) for the bias that balances without a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penteract.engine.chance import chances, round_into
from penteract.engine.scaling import LossScale
from penteract.engine.state import Flat, State
from penteract.spec.run import Optimizer
from penteract.step.program import Program
from penteract.step.update import SLICE


@dataclass(slots=True)
class AdamW:
    """Rate and step are device tensors, so that a captured step needs nothing from the host.

    `seed` decides how parameters without a master are rounded. `scaling`: of the loss, or None.
    """

    spec: Optimizer
    device: torch.device
    seed: int = 0
    scaling: LossScale | None = None
    rate: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=self.device)
        self.step = torch.ones((), dtype=torch.float64, device=self.device)  # the one now taken, from 1

    def update(self, flat: Flat, squared_norm: torch.Tensor) -> None:
        """One step of a shard's parameters, in place but for one temporary of its size; what is narrower than the
        update is widened by slices.

        Where the norm is not finite, on the device: the gradient counts as zero and every factor as one, so that
        parameters and moments stay what they were.
        """
        whole = len(flat.master)
        size = SLICE if flat.sliced else max(1, whole)
        for at in range(0, whole, size):
            self._move(flat, slice(at, min(at + size, whole)), squared_norm)
        flat.follow()

    def _move(self, flat: Flat, part: slice, squared_norm: torch.Tensor) -> None:
        s, dtype = self.spec, squared_norm.dtype
        good = squared_norm.isfinite().to(dtype)
        g = flat.own_gradient[part].to(dtype)
        g.nan_to_num_(0.0, 0.0, 0.0).mul_(self._factor(squared_norm))
        b1, b2 = s.betas
        mean = flat.read("mean", part, dtype).lerp_(g, good * (1 - b1))
        square = flat.read("square", part, dtype).mul_(1 - good * (1 - b2)).addcmul_(g, g, value=1 - b2)
        del g
        taken = self.step if self.scaling is None else self.step - self.scaling.skipped
        bias1, bias2 = 1 - b1**taken, 1 - b2**taken
        quotient = square.sqrt().div_(bias2.sqrt().to(dtype)).add_(s.epsilon)
        torch.div(mean, quotient, out=quotient)
        flat.write("mean", part, mean)
        flat.write("square", part, square)
        del mean, square
        master = flat.master[part].to(dtype)
        if flat.bucket.decay:
            master.mul_(1 - good * (self.rate * s.weight_decay).to(dtype))
        master.sub_(quotient.mul_(good * (self.rate / bias1).to(dtype)))
        del quotient
        self._put(flat, part, master)

    def _put(self, flat: Flat, part: slice, moved: torch.Tensor) -> None:
        """The moved elements of a slice back to where they are kept: they are there already, unless they are wider."""
        kept = flat.master[part]
        if kept.dtype == moved.dtype:
            return
        if flat.places:
            round_into(kept, moved, chances(flat.places, part, self.seed, self.step))
        else:
            kept.copy_(moved)

    def clipping(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied with so that their norm is small enough, [], at most one."""
        if not self.spec.clip_norm:
            return torch.ones_like(squared_norm)
        return (self.spec.clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1)

    def _factor(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """Clipping, with the loss's scale taken out; zero where the norm is not finite."""
        clipping = self.clipping(squared_norm).nan_to_num(0.0)
        return clipping if self.scaling is None else clipping / self.scaling.used

    def end(self, p: Program, state: State, squared_norm: torch.Tensor) -> None:
        """Experts chosen less than the mean get a larger bias, by one fixed step; the loss's scale follows."""
        good = squared_norm.isfinite()
        if p.model.moe is not None:
            for name, tally in state.tallies.items():
                chosen = tally.to(state.biases[name].dtype)
                state.biases[name].add_((chosen.mean() - chosen).sign_().mul_(p.model.moe.bias_rate).mul_(good))
        if self.scaling is not None:
            self.scaling.end(squared_norm)
