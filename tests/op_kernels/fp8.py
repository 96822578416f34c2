"""FP8 written out by hand: every code's value, the nearest code of a number, the scales of each recipe."""

from __future__ import annotations

from functools import cache

import torch

from penteract.config.precision.fp8 import Fp8

MANTISSA = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}


@cache
def values(name: str) -> tuple[float, ...]:
    """The 128 codes without a sign, by number: OCP 8-bit floating point, tables 1 and 2. NaN and infinity are None."""
    bits, bias, out = MANTISSA[name], BIAS[name], list[float]()
    for code in range(128):
        exponent, mantissa = code >> bits, code & (2**bits - 1)
        fraction = mantissa / 2**bits
        if exponent:
            out.append((1 + fraction) * 2.0 ** (exponent - bias))
        else:
            out.append(fraction * 2.0 ** (1 - bias))
    return tuple(out[: {"e4m3": 127, "e5m2": 124}[name]])


def nearest(x: float, name: str) -> float:
    """The nearest value, of two as near the one whose code is even; beyond the largest, the largest."""
    table, size = values(name), abs(x)
    best = min(range(len(table)), key=lambda c: (abs(table[c] - size), c % 2))
    return -table[best] if x < 0 else table[best]


def scales(x: torch.Tensor, fp8: Fp8, name: str, *, square: bool = False) -> torch.Tensor:
    """x [rows, k] in fp64 -> what each element is divided by: the largest of its group, over the largest code."""
    rows, k = x.shape
    high, wide = {"rowwise": (1, k), "blockwise": (fp8.block if square else 1, fp8.block)}.get(fp8.kind, (rows, k))
    out = torch.empty_like(x)
    for r in range(0, rows, high):
        for c in range(0, k, wide):
            part = x[r : r + high, c : c + wide]
            scale = part.abs().max().float() / torch.tensor(values(name)[-1], dtype=torch.float32)
            if fp8.powers:
                scale = 2.0 ** torch.log2(scale.double()).ceil()
            out[r : r + high, c : c + wide] = scale.double()
    return out


def rounded(x: torch.Tensor, fp8: Fp8, name: str, *, square: bool = False) -> torch.Tensor:
    """What x is after its codes: divided by its scales in single precision, rounded, and multiplied back."""
    by = scales(x, fp8, name, square=square)
    codes = (x.float() / by.float()).tolist()
    return torch.tensor([[nearest(v, name) for v in row] for row in codes], dtype=torch.float64) * by
