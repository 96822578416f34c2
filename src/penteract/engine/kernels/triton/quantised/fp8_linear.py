"""FP8 data, rowwise and columnwise, from one reading: the bits of plain torch in `kernels/quantised/fp8_linear.py`.

The largest absolute value is found as a pattern of bits, as in `quantise.py`: `max` has one answer in any order. A tile
is transposed while it is in 16 bits: FP8 data that were transposed in registers came out wrong in Triton 3.6.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from penteract.config.precision.fp8 import LARGEST, Format, Fp8
from penteract.engine.device.launches import bind
from penteract.engine.kernels.quantised.casters import Caster, Casters, Fp8Data, PutFp8, PutLargest
from penteract.engine.kernels.quantised.fp8 import real
from penteract.engine.kernels.quantised.fp8_linear import Fp8Kernels
from penteract.engine.kernels.quantised.quantise import TINY
from penteract.engine.kernels.triton.fusions import as_one, rotate_
from penteract.engine.kernels.triton.quantised.fp8_glu import largest_slope_of, put_glu, sampled_slopes_of, slopes_of
from penteract.engine.kernels.triton.quantised.fp8_tiles import (
    COLUMNS,
    PROGRAMS,
    ROWS,
    WARPS,
    inverse_of,
    put_larger,
    put_tile,
)
from penteract.engine.kernels.triton.quantised.quantise import patterns_of
from penteract.engine.kernels.triton.strides import tiles

# Numbers that a program of `_largest` reads at a time.
_AT_ONCE = 8192


@triton.jit
def _largest(x, out, grains, SIZE: tl.constexpr, GRAIN: tl.constexpr):
    """Of `grains` times GRAIN numbers, in the order in which they lie. out: fp32 [1], with what was found before."""
    each: tl.constexpr = SIZE // GRAIN
    at, found = tl.arange(0, SIZE), tl.zeros((SIZE,), tl.int32)
    for first in range(tl.program_id(0).to(tl.int64) * each, grains, tl.num_programs(0).to(tl.int64) * each):
        left = tl.minimum(grains - first, each).to(tl.int32) * GRAIN
        values = tl.load(x + first * GRAIN + at, at < left, other=0.0).to(tl.float32)
        found = tl.maximum(found, patterns_of(values))
    put_larger(out, tl.max(found, axis=0))


@triton.jit
def _quantise_tile(
    x, largest, scale, rowwise, columnwise, rows, k, by_row, rowwise_by_row, columnwise_by_row, limit, least,
    POWERS: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of x [rows, k]. largest: fp32 [1], of which the scale is made; None: the scale is given. columnwise: [k,
    rows]."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.program_id(1).to(tl.int64) * K + tl.arange(0, K)
    inside = (r < rows)[:, None] & (c < k)[None, :]
    tile = tl.load(x + r[:, None] * by_row + c[None, :], mask=inside, other=0.0)
    inverse = inverse_of(largest, scale, least, limit, POWERS)
    if rowwise is not None:
        put_tile(tile, inverse, limit, rowwise + r[:, None] * rowwise_by_row + c[None, :], inside)
    if columnwise is not None:
        there = (c < k)[:, None] & (r < rows)[None, :]
        put_tile(tl.trans(tile), inverse, limit, columnwise + c[:, None] * columnwise_by_row + r[None, :], there)


def largest_of(x: torch.Tensor) -> PutLargest:
    """Of x, whole in memory."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor with strides {x.stride()} is not whole")
    n = x.numel()
    grain = gcd(n, 16)  # elements: lets the compiler use loads of 16 bytes
    grid = (min(PROGRAMS, tiles(n, _AT_ONCE)),)
    launch = bind(_largest, grid, x, None, n // grain, SIZE=_AT_ONCE, GRAIN=grain, num_warps=WARPS)
    return lambda largest: launch(out=largest)


def fp8_of(fp8: Fp8, name: Format, x: torch.Tensor, scale: torch.Tensor) -> PutFp8:
    """FP8 data of x [rows, k], as `kernels/quantised/fp8_linear.py` has it."""
    rows, k = x.shape
    launch = bind(
        _quantise_tile, (tiles(rows, ROWS), tiles(k, COLUMNS)), x, None, scale, None, None, rows, k, x.stride(0), 0, 0,
        LARGEST[name], TINY, POWERS=fp8.powers_of(name), R=ROWS, K=COLUMNS, num_warps=WARPS,
    )  # fmt: skip

    def put(largest: torch.Tensor | None, into: Fp8Data) -> None:
        rowwise, columnwise = into
        launch(
            largest=largest, rowwise=rowwise, columnwise=columnwise,
            rowwise_by_row=0 if rowwise is None else rowwise.stride(0),
            columnwise_by_row=0 if columnwise is None else columnwise.stride(0),
        )  # fmt: skip

    return put


TRITON = Casters(
    Caster(largest_of, fp8_of, overwrites=False), Caster(largest_slope_of, slopes_of, overwrites=False),
    sampled_slopes_of, put_glu, as_one,
)  # fmt: skip
FP8_LINEAR = Fp8Kernels(TRITON, real, rotate_).table()
