"""Optimizer moments in 8 bits: blocks of quantised elements, each block with a scale.

Dettmers 2022 (2110.02861), §2: a dynamic code has levels in every decade, so that a millionth of a block's largest
element still has one. The largest element is exactly level 1, so reading and writing again changes nothing. Second
moments have no level for zero: an update divided by a second moment of zero would be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from penteract.config.precision.policy import BLOCK

_DECADES = 7


@dataclass(frozen=True, slots=True)
class Code:
    """`levels` [256], ascending: values of elements divided by their block's largest; `borders` [255] between them."""

    levels: torch.Tensor
    borders: torch.Tensor


@cache
def code(device: torch.device, *, signed: bool) -> Code:
    """The code of first moments (signed), or that of second moments."""
    bits = 6 if signed else 7
    counts = [2 ** (bits - d) for d in range(_DECADES)]
    above = [10.0**-d * (0.1 + 0.9 * (i + 1) / n) for d, n in enumerate(counts) for i in range(n)]
    values = sorted([*above, 0.0, *(-x for x in above)] if signed else [10.0 ** -(_DECADES + 1), *above])
    values += [1.0] * (256 - len(values))
    levels = torch.tensor(values, dtype=torch.float64)
    borders = (levels[1:] + levels[:-1]) / 2
    return Code(levels.float().to(device), borders.float().to(device))


def read(kept: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
    """Elements [n] as `dtype`: the same tensor if it already has this dtype. scales: [n / 256], or None if the elements
    are not quantised."""
    if scales is None:
        return kept.to(dtype)
    wide = torch.index_select(code(kept.device, signed=signed).levels, 0, kept.to(torch.int32)).to(dtype)
    wide.view(-1, BLOCK).mul_(scales[:, None])
    return wide


def write(kept: torch.Tensor, scales: torch.Tensor | None, wide: torch.Tensor, *, signed: bool) -> None:
    """Round `wide` into `kept`. With scales, the content of `wide` is lost."""
    if scales is None:
        if kept.data_ptr() != wide.data_ptr():
            kept.copy_(wide)
        return
    blocks = wide.view(-1, BLOCK)
    torch.linalg.vector_norm(blocks, ord=float("inf"), dim=-1, out=scales)
    blocks.div_(scales[:, None].clamp(min=torch.finfo(scales.dtype).tiny))
    kept.copy_(torch.bucketize(wide, code(kept.device, signed=signed).borders, out_int32=True))
