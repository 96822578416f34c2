"""FP8 written out by hand: every encoding's value, the nearest one to a number, the scales of each recipe."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.quantised.fp8 import emulated

MANTISSA = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}


@cache
def values(name: str) -> tuple[float, ...]:
    """The 128 values without a sign, by number: OCP 8-bit floating point, tables 1 and 2. NaN and infinity are None."""
    bits, bias, out = MANTISSA[name], BIAS[name], list[float]()
    for encoding in range(128):
        exponent, mantissa = encoding >> bits, encoding & (2**bits - 1)
        fraction = mantissa / 2**bits
        if exponent:
            out.append((1 + fraction) * 2.0 ** (exponent - bias))
        else:
            out.append(fraction * 2.0 ** (1 - bias))
    return tuple(out[: {"e4m3": 127, "e5m2": 124}[name]])


def nearest(x: float, name: str) -> float:
    """The nearest value, of two as near the one whose encoding is even; beyond the largest, the largest."""
    table, size = values(name), abs(x)
    best = min(range(len(table)), key=lambda c: (abs(table[c] - size), c % 2))
    return -table[best] if x < 0 else table[best]


def scales(x: torch.Tensor, fp8: Fp8, name: str, *, square: bool = False) -> torch.Tensor:
    """x [rows, k] in fp64 -> what each element is divided by: the largest of its group, over the largest FP8 value."""
    rows, k = x.shape
    high, wide = {"rowwise": (1, k), "blockwise": (fp8.block if square else 1, fp8.block)}.get(fp8.kind, (rows, k))
    out = torch.empty_like(x)
    for r in range(0, rows, high):
        for c in range(0, k, wide):
            part = x[r : r + high, c : c + wide]
            scale = part.abs().max().float() / torch.tensor(values(name)[-1], dtype=torch.float32)
            if fp8.powers or (fp8.kind == "tensorwise" and name == "e5m2"):
                scale = 2.0 ** torch.log2(scale.double()).ceil()
            out[r : r + high, c : c + wide] = scale.double()
    return out


def rounded(x: torch.Tensor, fp8: Fp8, name: str, *, square: bool = False) -> torch.Tensor:
    """What x is after quantisation: divided by its scales in single precision, rounded, and multiplied back."""
    by = scales(x, fp8, name, square=square)
    divided = (x.float() / by.float()).tolist()
    return torch.tensor([[nearest(v, name) for v in row] for row in divided], dtype=torch.float64) * by


# ---- one scale, and its inverse --------------------------------------------------------------------------------------


def quantised(x: torch.Tensor, fp8: Fp8, name: str, largest: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp64 -> data uint8, and the scale of all [1]: each value times the inverse of the scale, in fp32.
    `largest`: the value that the scale is of."""
    looked = x.flatten()[None] if largest is None else torch.tensor([[largest]], dtype=torch.float64)
    scale = scales(looked, replace(fp8, kind="tensorwise"), name)[0, :1]
    inverse = torch.ones(1) / scale.float()
    numbers = [nearest(v, name) for v in (x.float() * inverse).flatten().tolist()]
    table = values(name)
    data = [table.index(abs(v)) + 128 * (math.copysign(1, v) < 0) for v in numbers]
    return torch.tensor(data, dtype=torch.uint8).view(x.shape), scale


def dequantised(data: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """FP8 data uint8 -> the values that they stand for, in fp64."""
    table = torch.tensor(values(name) + (math.nan,) * (128 - len(values(name))), dtype=torch.float64)
    signs = 1 - 2 * (data >> 7).double()
    return table[(data & 127).long()] * signs * scale.double()


def counted(fp8: Fp8, a: Any, b: Any, out: torch.Tensor, forward: bool) -> None:
    """Emulated products, whose FLOPs are seen and whose memory is not."""
    with _disable_current_modes(), torch.no_grad():
        emulated(fp8, a, b, out, forward)
        like = [torch.empty(x.data.shape, dtype=torch.bfloat16) for x in (a, b)]
        unread = torch.empty(out.shape, dtype=torch.bfloat16)
    torch.mm(like[0], like[1].t(), out=unread)
