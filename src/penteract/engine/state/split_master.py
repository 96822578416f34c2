"""fp32 master weights in two halves: the bf16 parameter, and a buffer with the 16 bits that it lacks.

The parameter is the master weight rounded to the nearest bf16, ties away from zero. The difference of their bit
patterns then fits in an int16, so both together are the master weight, exactly. (With ties to even it needs 17 bits.)

Split-SGD-BF16 of Kalamkar 2020 (2005.04680) §4 keeps both halves too, but truncates.
"""

from __future__ import annotations

import torch

_LARGEST_NAN = 0x7FFF7FFF  # the largest pattern that stays a NaN if it is rounded


def join(parameter: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """parameter bf16 [n], low int16 [n] -> the master weights, fp32 [n]: a copy."""
    bits = parameter.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low).view(torch.float32)


def rounded(values: torch.Tensor, out: torch.Tensor) -> None:
    """Round fp32 values of any shape to bf16 `out`, as parameters of split master weights are rounded."""
    out.view(torch.int16).copy_(_upper(values.view(torch.int32)))


def split(values: torch.Tensor, parameter: torch.Tensor, low: torch.Tensor) -> None:
    """Write master weights fp32 [n] as their halves; overwrites `values`. One temporary of the size of `values`."""
    bits = values.view(torch.int32)
    upper = _upper(bits)
    parameter.view(torch.int16).copy_(upper)
    low.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def _upper(bits: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits after rounding, as int32."""
    return bits.clamp(max=_LARGEST_NAN).add_(0x8000).bitwise_right_shift_(16)
