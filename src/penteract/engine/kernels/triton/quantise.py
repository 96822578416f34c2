"""Codes of FP8 and their scales by kernels: what `kernels/quantise.py` says in plain torch, equal to the bit.

A tensor [rows, k] is read through its strides in tiles, so that one that lies the other way round is turned on the
way. The largest absolute values are found as patterns of bits: without their sign, those of floats are in the order
of the floats, a NaN above all, and `max` has one answer in any order. Blocks lie in one tile each: their largest value
and their codes come from one reading.
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
from penteract.engine.kernels.quantise import TINY, Look, Operand, Quantiser, as_shared

# Rows, and of k: whole lines of memory whichever way a tensor lies.
TILE, TO_LOOK = (32, 128), (64, 128)
_FLAT = 4096  # numbers, where they have no rows
_WARPS = 4  # of one; of a square of a weight, twice as many
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits but the sign


@triton.jit
def _read(x, rows, k, by_row, by_k, R: tl.constexpr, K: tl.constexpr):
    """A tile as fp32, zeros beyond the end; where its elements are: row, place in it, and whether they are there."""
    r = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    c = (tl.program_id(1).to(tl.int64) * K + tl.arange(0, K))[None, :]
    inside = (r < rows) & (c < k)
    return tl.load(x + r * by_row + c * by_k, mask=inside, other=0.0).to(tl.float32), r, c, inside


@triton.jit
def patterns_of(tile):
    """Absolute values as numbers in the same order."""
    return tile.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _largest(x, out, rows, k, by_row, by_k, BY_ROW: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """out: int32 [1], or BY_ROW [rows]."""
    tile, r, _, _ = _read(x, rows, k, by_row, by_k, R, K)
    of_rows = tl.max(patterns_of(tile), axis=1)
    if BY_ROW:
        tl.atomic_max(out + r, of_rows[:, None], mask=r < rows)
    else:
        tl.atomic_max(out, tl.max(of_rows, axis=0))


@triton.jit
def scale_of(patterns, least, limit, POWERS: tl.constexpr):
    """The scale of what is as large as this; POWERS: rounded up to a power of two."""
    largest = tl.maximum(patterns.to(tl.float32, bitcast=True), least, propagate_nan=tl.PropagateNan.ALL)
    made = tl.div_rn(largest, limit + tl.zeros_like(largest))
    if POWERS:
        made = ((made.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return made


@triton.jit
def _put_codes(tile, scale, limit, out, at, inside):
    """Divide, saturate, round to the nearest code, ties to even. A NaN stays one."""
    scaled = tl.div_rn(tile, scale + tl.zeros_like(tile))
    scaled = tl.maximum(scaled, -limit, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _codes(
    x, out, scale, largest, rows, k, by_row, by_k, limit, least, POWERS: tl.constexpr, BY_ROW: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """scale, and the patterns of the largest: [1], or BY_ROW [rows]."""
    tile, r, c, inside = _read(x, rows, k, by_row, by_k, R, K)
    at = r if BY_ROW else tl.zeros_like(r)
    made = scale_of(tl.load(largest + at, mask=at < rows, other=0), least, limit, POWERS)
    if tl.program_id(1) == 0:  # who shares a scale writes the same
        tl.store(scale + at, made, mask=at < rows)
    _put_codes(tile, made, limit, out, r * k + c, inside)


@triton.jit
def _blocks(
    x, out, scale, rows, k, by_row, by_k, limit, least, POWERS: tl.constexpr, SQUARE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile is K wide, a block; SQUARE: it is one. scale: [k / K, rows], or [rows / R, k / K]."""
    tile, r, c, inside = _read(x, rows, k, by_row, by_k, R, K)
    largest = tl.max(patterns_of(tile), axis=1, keep_dims=True)
    if SQUARE:
        largest = tl.max(largest, axis=0, keep_dims=True)
    made = scale_of(largest, least, limit, POWERS)
    block = tl.program_id(1)
    if SQUARE:
        tl.store(scale + tl.program_id(0) * tl.num_programs(1) + block + tl.zeros_like(largest), made)
    else:
        tl.store(scale + block.to(tl.int64) * rows + r, made, mask=r < rows)
    _put_codes(tile, made, limit, out, r * k + c, inside)


@triton.jit
def _divided(x, out, scale, n, limit, SIZE: tl.constexpr):
    """Numbers [n] in the order in which they lie."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = at < n
    _put_codes(tl.load(x + at, mask=here, other=0.0).to(tl.float32), tl.load(scale), limit, out, at, here)


def put_largest(fp8: Fp8, look: Look, out: torch.Tensor) -> None:
    """Absolute values, of all that share a scale, into zeros. Those of blocks are found with their codes."""
    if fp8.kind == "blockwise":
        return
    x, (rows, k) = look.rows, look.rows.shape
    _largest[_grid(rows, k, *TO_LOOK)](
        x, out.view(torch.int32), rows, k, *x.stride(), BY_ROW=fp8.kind == "rowwise", R=TO_LOOK[0],
        K=TO_LOOK[1], num_warps=_WARPS,
    )  # fmt: skip


def quantised(fp8: Fp8, look: Look, largest: torch.Tensor) -> Operand:
    """`largest`: of blocks, room for their scales."""
    x, (rows, k) = look.rows, look.rows.shape
    codes = torch.empty(rows, k, dtype=FORMATS[look.format], device=x.device)
    about = (rows, k, *x.stride(), LARGEST[look.format], TINY)
    if fp8.kind == "blockwise":
        scale, tile = largest, (fp8.block if look.square else TILE[0], fp8.block)
        _blocks[_grid(rows, k, *tile)](
            x,
            codes,
            scale,
            *about,
            POWERS=fp8.powers,
            SQUARE=look.square,
            R=tile[0],
            K=tile[1],
            num_warps=_WARPS * (1 + look.square),
        )
    else:
        scale = torch.empty_like(largest)
        _codes[_grid(rows, k, *TILE)](
            x, codes, scale, largest.view(torch.int32), *about, POWERS=fp8.powers, BY_ROW=fp8.kind == "rowwise",
            R=TILE[0], K=TILE[1], num_warps=_WARPS,
        )  # fmt: skip
    return Operand(codes, as_shared(fp8, look, scale))


def put_codes(name: Format, values: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, room: torch.Tensor) -> None:
    """Of numbers [n] that share a scale. It needs no room."""
    grid = (triton.cdiv(len(values), _FLAT),)
    _divided[grid](values, codes, scale, len(values), LARGEST[name], SIZE=_FLAT, num_warps=_WARPS)


def _grid(rows: int, k: int, high: int, wide: int) -> tuple[int, int]:
    return triton.cdiv(rows, high), triton.cdiv(k, wide)


TRITON = Quantiser(put_largest, quantised, put_codes, "triton")
