"""SwiGLU of FP8 layers: its largest value is found on the way; the gradients of gate and up in FP8, made in registers.

They are rounded as they would be in memory, so that the data are those of plain torch. Gate and up lie side by side
[T, 2·F], and so do the FP8 data of their gradients.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penteract.config.precision.fp8 import LARGEST, Format, Fp8
from penteract.config.precision.sampled_rows import EVERY, MARGIN
from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound
from penteract.engine.kernels.quantised.casters import Fp8Data, PutFp8, PutLargest, PutSampled, Slopes
from penteract.engine.kernels.quantised.quantise import TINY
from penteract.engine.kernels.triton.quantised.fp8_tiles import (
    COLUMNS,
    PROGRAMS,
    WARPS,
    inverse_of,
    pattern_at,
    put_above,
    put_larger,
    put_sampled,
    put_tile,
)
from penteract.engine.kernels.triton.quantised.quantise import patterns_of
from penteract.engine.kernels.triton.strides import tiles

_HIGH, _TIMES = 16, 16  # rows of a tile, and tiles, of a program that looks for the largest value
_SIDE, _FEW = 64, 4  # of a tile of two gradients, which fill twice the registers of one: its sides, and its warps


@triton.jit
def _slopes(packed, gradient, width, r, c, inside):
    """A tile of the gradients of gate and up, as they would be in memory."""
    at = r[:, None] * (2 * width) + c[None, :]
    a = tl.load(packed + at, inside, other=0.0).to(tl.float32)
    b = tl.load(packed + width + at, inside, other=0.0).to(tl.float32)
    d = tl.load(gradient + r[:, None] * width + c[None, :], inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(a)
    silu = a * share
    by_gate = d * b * (share + silu * (1.0 - share))
    return by_gate.to(packed.dtype.element_ty), (d * silu).to(packed.dtype.element_ty)


@triton.jit
def _forward(packed, out, largest, rows, width, R: tl.constexpr, C: tl.constexpr, TIMES: tl.constexpr):
    """silu(gate)·up. largest: fp32 [1], with what was found before."""
    c = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    found = tl.zeros((R, C), tl.int32)
    for i in range(TIMES):
        r = (tl.program_id(0).to(tl.int64) * TIMES + i) * R + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < width)[None, :]
        at = r[:, None] * (2 * width) + c[None, :]
        a = tl.load(packed + at, inside, other=0.0).to(tl.float32)
        b = tl.load(packed + width + at, inside, other=0.0).to(tl.float32)
        made = (a * tl.sigmoid(a) * b).to(out.dtype.element_ty)
        tl.store(out + r[:, None] * width + c[None, :], made, inside)
        found = tl.maximum(found, patterns_of(made.to(tl.float32)))
    put_larger(largest, tl.max(tl.max(found, axis=1), axis=0))


@triton.jit
def _largest(packed, gradient, largest, rows, width, R: tl.constexpr, C: tl.constexpr, TIMES: tl.constexpr):
    """Of the gradients of gate and up."""
    c = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    found = tl.zeros((R, C), tl.int32)
    for i in range(TIMES):
        r = (tl.program_id(0).to(tl.int64) * TIMES + i) * R + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < width)[None, :]
        by_gate, by_up = _slopes(packed, gradient, width, r, c, inside)
        both = tl.maximum(patterns_of(by_gate.to(tl.float32)), patterns_of(by_up.to(tl.float32)))
        found = tl.maximum(found, both)
    put_larger(largest, tl.max(tl.max(found, axis=1), axis=0))


@triton.jit
def _sample(
    packed, gradient, largest, rows, width, EVERY: tl.constexpr, MARGIN: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """The same of every so many rows, with a margin above it."""
    r = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)) * EVERY
    c = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    put_sampled(largest, _larger(*_slopes(packed, gradient, width, r, c, inside)), MARGIN)


@triton.jit
def _larger(by_gate, by_up):
    """The pattern of the largest value of two tiles."""
    both = tl.maximum(patterns_of(by_gate.to(tl.float32)), patterns_of(by_up.to(tl.float32)))
    return tl.max(tl.max(both, axis=1), axis=0)


@triton.jit
def _put(
    packed, gradient, inverse, limit, rowwise, columnwise, rows, width, columnwise_by_row, down, across,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Data of a tile of both gradients, which are the result. rowwise: [rows, 2·width]; columnwise: [2·width, rows]."""
    r = down.to(tl.int64) * R + tl.arange(0, R)
    c = across.to(tl.int64) * C + tl.arange(0, C)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    there = (c < width)[:, None] & (r < rows)[None, :]
    by_gate, by_up = _slopes(packed, gradient, width, r, c, inside)
    at = rowwise + r[:, None] * (2 * width) + c[None, :]
    put_tile(by_gate, inverse, limit, at, inside)
    put_tile(by_up, inverse, limit, at + width, inside)
    put_tile(tl.trans(by_gate), inverse, limit, columnwise + c[:, None] * columnwise_by_row + r[None, :], there)
    put_tile(tl.trans(by_up), inverse, limit, columnwise + (c + width)[:, None] * columnwise_by_row + r[None, :], there)
    return by_gate, by_up


@triton.jit
def _quantise_tile(
    packed, gradient, largest, scale, rowwise, columnwise, rows, width, columnwise_by_row, limit, least,
    POWERS: tl.constexpr, FIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile. largest: fp32 [1], of which the scale is made. FIND: a larger value goes behind it, fp32 [2]."""
    inverse = inverse_of(largest, scale, least, limit, POWERS)
    by_gate, by_up = _put(
        packed, gradient, inverse, limit, rowwise, columnwise, rows, width, columnwise_by_row, tl.program_id(0),
        tl.program_id(1), R, C,
    )  # fmt: skip
    if FIND:
        put_above(largest, _larger(by_gate, by_up))


@triton.jit
def _quantise_again(
    packed, gradient, largest, scale, rowwise, columnwise, rows, width, columnwise_by_row, limit, least,
    POWERS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """All data anew where a value was larger than what the scale was made of. largest: fp32 [2], both."""
    if pattern_at(largest + 1) > pattern_at(largest):
        inverse, wide = inverse_of(largest + 1, scale, least, limit, POWERS), tl.cdiv(width, C)
        for at in range(tl.program_id(0), tl.cdiv(rows, R) * wide, tl.num_programs(0)):
            _put(
                packed, gradient, inverse, limit, rowwise, columnwise, rows, width, columnwise_by_row, at // wide,
                at % wide, R, C,
            )  # fmt: skip


def _grid(rows: int, width: int, high: int) -> tuple[int, int]:
    return tiles(rows, high), tiles(width, COLUMNS)


@Bindable
def put_glu(packed: torch.Tensor, out: torch.Tensor, largest: torch.Tensor) -> Bound:
    """SwiGLU of packed [T, 2·F] into [T, F]; its largest value, and of what is in `largest` [1]."""
    rows, width = out.shape
    return bind(
        _forward, _grid(rows, width, _HIGH * _TIMES), packed, out, largest, rows, width, R=_HIGH, C=COLUMNS,
        TIMES=_TIMES, num_warps=WARPS,
    )  # fmt: skip


def largest_slope_of(x: Slopes) -> PutLargest:
    """Of the gradients of gate and up."""
    rows, width = x.gradient.shape
    launch = bind(
        _largest, _grid(rows, width, _HIGH * _TIMES), *x, None, rows, width, R=_HIGH, C=COLUMNS, TIMES=_TIMES,
        num_warps=WARPS,
    )  # fmt: skip
    return lambda largest: launch(largest=largest)


def slopes_of(fp8: Fp8, name: Format, x: Slopes, scale: torch.Tensor) -> PutFp8:
    """FP8 data of the gradients of gate and up, rowwise and columnwise."""
    rows, width = x.gradient.shape
    launch = bind(
        _quantise_tile, (tiles(rows, _SIDE), tiles(width, _SIDE)), *x, None, scale, None, None, rows, width, 0,
        LARGEST[name], TINY, POWERS=fp8.powers_of(name), FIND=False, R=_SIDE, C=_SIDE, num_warps=_FEW,
    )  # fmt: skip

    def put(largest: torch.Tensor | None, into: Fp8Data) -> None:
        rowwise, columnwise = into
        assert rowwise is not None and columnwise is not None and largest is not None
        launch(largest=largest, rowwise=rowwise, columnwise=columnwise, columnwise_by_row=columnwise.stride(0))

    return put


def sampled_slopes_of(fp8: Fp8, name: Format, x: Slopes, scale: torch.Tensor) -> PutSampled:
    """The same by the largest value of some rows; the last launch ends at once but where that was too small."""
    rows, width = x.gradient.shape
    sample = bind(
        _sample, (tiles(tiles(rows, EVERY), _HIGH), tiles(width, COLUMNS)), *x, None, rows, width, EVERY=EVERY,
        MARGIN=MARGIN, R=_HIGH, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    about = (*x, None, scale, None, None, rows, width, 0, LARGEST[name], TINY)
    how: dict[str, Any] = {"POWERS": fp8.powers_of(name), "R": _SIDE, "C": _SIDE, "num_warps": _FEW}
    high, wide = tiles(rows, _SIDE), tiles(width, _SIDE)
    cast = bind(_quantise_tile, (high, wide), *about, FIND=True, **how)
    again = bind(_quantise_again, (min(PROGRAMS, high * wide),), *about, **how)

    def put(zeros: torch.Tensor, into: Fp8Data) -> None:
        rowwise, columnwise = into
        assert rowwise is not None and columnwise is not None
        places: dict[str, Any] = {
            "rowwise": rowwise, "columnwise": columnwise, "columnwise_by_row": columnwise.stride(0)
        }  # fmt: skip
        sample(largest=zeros)
        cast(largest=zeros, **places)
        again(largest=zeros, **places)

    return put
