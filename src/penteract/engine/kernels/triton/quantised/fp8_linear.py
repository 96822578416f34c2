"""Codes of FP8 both ways round, from one reading: equal to the bit to plain torch in `kernels/quantised/fp8_linear.py`.

The largest absolute value is found as a pattern of bits, as in `quantise.py`: `max` has one answer in any order. A tile
is turned while it is in 16 bits: codes that are turned in registers came out wrong in Triton 3.6.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.config.precision.fp8 import LARGEST, Format, Fp8
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.quantised.fp8 import real
from penteract.engine.kernels.quantised.fp8_linear import Caster, Casters, Codes, Fp8Kernels
from penteract.engine.kernels.quantised.quantise import TINY
from penteract.engine.kernels.triton.fusions import as_one, rotate_
from penteract.engine.kernels.triton.quantised.fp8_glu import put_glu, put_largest_slope, put_slopes
from penteract.engine.kernels.triton.quantised.fp8_tiles import COLUMNS, ROWS, WARPS, inverse_of, put_tile
from penteract.engine.kernels.triton.quantised.quantise import patterns_of

_AT_ONCE, _TIMES = 4096, 8  # numbers that a program looks at, and how often


@triton.jit
def _largest(x, out, n, SIZE: tl.constexpr, TIMES: tl.constexpr):
    """Of numbers [n] in the order in which they lie. out: int32 [1], with the pattern of what was found before."""
    begin = tl.program_id(0).to(tl.int64) * (SIZE * TIMES)
    found = tl.zeros((SIZE,), tl.int32)
    for i in tl.static_range(TIMES):
        at = begin + i * SIZE + tl.arange(0, SIZE)
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        found = tl.maximum(found, patterns_of(values))
    tl.atomic_max(out, tl.max(found, axis=0))


@triton.jit
def _codes(
    x, largest, scale, straight, turned, rows, k, by_row, straight_by_row, turned_by_row, limit, least,
    POWERS: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of x [rows, k]. largest: int32 [1], of which the scale is made; None: it is known. `turned` [k, rows]."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.program_id(1).to(tl.int64) * K + tl.arange(0, K)
    inside = (r < rows)[:, None] & (c < k)[None, :]
    tile = tl.load(x + r[:, None] * by_row + c[None, :], mask=inside, other=0.0)
    inverse = inverse_of(largest, scale, least, limit, POWERS)
    if straight is not None:
        put_tile(tile, inverse, limit, straight + r[:, None] * straight_by_row + c[None, :], inside)
    if turned is not None:
        there = (c < k)[:, None] & (r < rows)[None, :]
        put_tile(tl.trans(tile), inverse, limit, turned + c[:, None] * turned_by_row + r[None, :], there)


def put_largest(x: torch.Tensor, largest: torch.Tensor) -> None:
    """Of x, whole in memory, and of what is in `largest` [1], into it."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor with strides {x.stride()} is not whole")
    grid = (triton.cdiv(x.numel(), _AT_ONCE * _TIMES),)
    _largest[grid](x, largest.view(torch.int32), x.numel(), SIZE=_AT_ONCE, TIMES=_TIMES, num_warps=WARPS)


def put_codes(
    fp8: Fp8, name: Format, x: torch.Tensor, largest: torch.Tensor | None, scale: torch.Tensor, into: Codes
) -> None:
    """Codes of x [rows, k], as `kernels/quantised/fp8_linear.py` has it."""
    (rows, k), dtype = x.shape, FORMATS[name]
    straight, turned = (None if target is None else target.view(dtype) for target in into)
    _codes[triton.cdiv(rows, ROWS), triton.cdiv(k, COLUMNS)](
        x, None if largest is None else largest.view(torch.int32), scale, straight, turned, rows, k, x.stride(0),
        0 if straight is None else straight.stride(0), 0 if turned is None else turned.stride(0), LARGEST[name], TINY,
        POWERS=fp8.powers, R=ROWS, K=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


TRITON = Casters(Caster(put_largest, put_codes), Caster(put_largest_slope, put_slopes), put_glu, as_one)
FP8_LINEAR = Fp8Kernels(TRITON, real, rotate_).table()
