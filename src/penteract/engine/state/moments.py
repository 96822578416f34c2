"""Optimizer moments in 8 bits: blocks of quantised elements, each block with a scale.

Dettmers 2022 (arXiv:2110.02861), §2: a dynamic codebook has levels in every decade, so that a millionth of a block's
largest element still has one. The largest element is exactly level 1, so dequantizing and quantizing again changes
nothing. Second moments have no level for zero: an update divided by a second moment of zero would be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.engine.device.storages import same_memory

_DECADES = 7  # powers of ten below 1


@dataclass(frozen=True, slots=True)
class Codebook:
    """`levels` [256], ascending: elements divided by their block's largest; `midpoints` [255] between them."""

    levels: torch.Tensor
    midpoints: torch.Tensor


@cache
def codebook(device: torch.device, *, signed: bool) -> Codebook:
    """The codebook of first moments (signed), or that of second moments.

    Signed: 64 + 32 + … + 1 = 127 levels of each sign, and 0. Unsigned: 128 + 64 + … + 2 = 254, and 1e-8. Level 1.0 is
    repeated up to 256.
    """
    bits = 6 if signed else 7
    counts = [2 ** (bits - d) for d in range(_DECADES)]
    above = [10.0**-d * (0.1 + 0.9 * (i + 1) / n) for d, n in enumerate(counts) for i in range(n)]
    found = sorted([*above, 0.0, *(-x for x in above)] if signed else [10.0 ** -(_DECADES + 1), *above])
    found += [1.0] * (256 - len(found))
    levels = torch.tensor(found, dtype=torch.float64)
    midpoints = (levels[1:] + levels[:-1]) / 2
    return Codebook(levels.float().to(device), midpoints.float().to(device))


def dequantize(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
    """Elements [n] as `dtype`: the same tensor if it already has this dtype. scales: [n / 256], or None if the elements
    are not quantised."""
    if scales is None:
        return stored.to(dtype)
    values = torch.index_select(codebook(stored.device, signed=signed).levels, 0, stored.to(torch.int32)).to(dtype)
    values.view(-1, MOMENT_BLOCK).mul_(scales[:, None])
    return values


def quantize(stored: torch.Tensor, scales: torch.Tensor | None, values: torch.Tensor, *, signed: bool) -> None:
    """Quantize `values` [n] into `stored` [n], or copy them if there are no scales; overwrites `values`."""
    if scales is None:
        if not same_memory(stored, values):
            stored.copy_(values)
        return
    blocks = values.view(-1, MOMENT_BLOCK)
    torch.linalg.vector_norm(blocks, ord=float("inf"), dim=-1, out=scales)
    blocks.div_(scales[:, None].clamp(min=torch.finfo(scales.dtype).tiny))
    stored.copy_(torch.bucketize(values, codebook(stored.device, signed=signed).midpoints, out_int32=True))
