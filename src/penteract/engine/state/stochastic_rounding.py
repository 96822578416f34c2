"""Stochastic rounding. The random bits depend on the seed, the step, and an element's index in its global tensor.

A bf16 parameter without master weights has 8 significant bits; an update below half of the last bit would be lost in
every step. Rounding up with the probability of the cut-off fraction is right on average (Gupta 2015, 1502.02551). The
random bits depend on nothing else, so every layout rounds alike, and replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penteract.engine.state.counter_random import STRIDE, ParameterSlice, mix

EPOCH = 2**40  # distance from a step's counters to the next step's; more than elements of a tensor
LOW = 16  # bits of float32 that bfloat16 lacks


def round_into(narrow: torch.Tensor, wide: torch.Tensor, bits: torch.Tensor) -> None:
    """Round float32 to bfloat16: `bits`, below 2^16, are added to the bits that are cut off. `wide` is lost."""
    pattern = wide.view(torch.int32)
    pattern.add_(bits).bitwise_and_(-(2**LOW))
    narrow.copy_(wide)


def random_bits(slices: Iterable[ParameterSlice], part: slice, seed: int, step: torch.Tensor) -> torch.Tensor:
    """Random numbers below 2^16 for a shard's elements `part`, int64 [n]. step: [], on the device."""
    z = torch.zeros(part.stop - part.start, dtype=torch.int64, device=step.device)
    now = step.to(torch.int64)
    for s in slices:
        first, last = max(part.start, s.at), min(part.stop, s.at + s.count)
        if first < last:
            own = z[first - part.start : last - part.start]
            s.put_global_indices(own, first)
            own.add_(now, alpha=EPOCH).mul_(STRIDE).add_(s.start(seed, "rounding"))
    return mix(z).bitwise_and_(2**LOW - 1)
