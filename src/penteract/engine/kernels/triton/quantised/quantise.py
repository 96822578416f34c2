"""FP8 quantisation in Triton kernels: the same as `kernels/quantised/quantise.py` in plain torch, with identical bits.

A tensor [rows, k] is read in tiles through its strides, so a transposed tensor is transposed on the way. The largest
absolute values are compared as bit patterns: without their sign these have the order of the floats, with NaN above all,
and the maximum does not depend on the order of comparison. A block lies in one tile, so its maximum and its quantised
values come from one read.
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
from penteract.engine.kernels.quantised.quantise import TINY, Operand, OperandView, Quantiser, as_shared
from penteract.engine.kernels.triton.strides import tiles

# (rows, columns) of a tile: whole cache lines, also of a transposed tensor.
TILE, AMAX_TILE = (32, 128), (64, 128)
_FLAT = 4096  # elements of a program, for 1-D tensors
_WARPS = 4  # of a tile; twice as many for a square block
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits but the sign


@triton.jit
def _read(x, rows, k, by_row, by_k, R: tl.constexpr, K: tl.constexpr):
    """A tile as fp32, with zeros outside of the tensor; and its elements' rows, columns, and whether they are
    inside."""
    r = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    c = (tl.program_id(1).to(tl.int64) * K + tl.arange(0, K))[None, :]
    inside = (r < rows) & (c < k)
    return tl.load(x + r * by_row + c * by_k, mask=inside, other=0.0).to(tl.float32), r, c, inside


@triton.jit
def patterns_of(tile):
    """Bit patterns of absolute values, which have the same order."""
    return tile.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _largest(x, out, rows, k, by_row, by_k, BY_ROW: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Put the patterns of the largest values into out: int32 [1], or BY_ROW [rows]."""
    tile, r, _, _ = _read(x, rows, k, by_row, by_k, R, K)
    of_rows = tl.max(patterns_of(tile), axis=1)
    if BY_ROW:
        tl.atomic_max(out + r, of_rows[:, None], mask=r < rows)
    else:
        tl.atomic_max(out, tl.max(of_rows, axis=0))


@triton.jit
def scale_of(patterns, least, limit, POWERS: tl.constexpr):
    """The scales for these amax patterns; POWERS: rounded up to powers of two, that of NaN to infinity."""
    largest = tl.maximum(patterns.to(tl.float32, bitcast=True), least, propagate_nan=tl.PropagateNan.ALL)
    made = tl.div_rn(largest, limit + tl.zeros_like(largest))
    if POWERS:
        patterns = tl.minimum(made.to(tl.int32, bitcast=True), 0x7F800000)
        made = ((patterns + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return made


@triton.jit
def _quantise_into(tile, scale, limit, out, at, inside):
    """Divide, saturate, and round to nearest, ties to even. A NaN stays a NaN."""
    scaled = tl.div_rn(tile, scale + tl.zeros_like(tile))
    scaled = tl.maximum(scaled, -limit, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantise(
    x, out, scale, largest, rows, k, by_row, by_k, limit, least, POWERS: tl.constexpr, BY_ROW: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """scale, and the patterns of the amax: [1], or BY_ROW [rows]."""
    tile, r, c, inside = _read(x, rows, k, by_row, by_k, R, K)
    at = r if BY_ROW else tl.zeros_like(r)
    made = scale_of(tl.load(largest + at, mask=at < rows, other=0), least, limit, POWERS)
    if tl.program_id(1) == 0:  # programs that share a scale write the same value
        tl.store(scale + at, made, mask=at < rows)
    _quantise_into(tile, made, limit, out, r * k + c, inside)


@triton.jit
def _quantise_blocks(
    x, out, scale, rows, k, by_row, by_k, limit, least, POWERS: tl.constexpr, SQUARE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile is one block (K) wide; SQUARE: it is one square block. scale: [k / K, rows], or [rows / R, k / K]."""
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
    _quantise_into(tile, made, limit, out, r * k + c, inside)


@triton.jit
def _quantise_flat(x, out, scale, n, limit, SIZE: tl.constexpr):
    """Numbers [n] that share a scale, in the order of memory."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = at < n
    _quantise_into(tl.load(x + at, mask=here, other=0.0).to(tl.float32), tl.load(scale), limit, out, at, here)


def put_largest(fp8: Fp8, view: OperandView, out: torch.Tensor) -> None:
    """Put the amax of each scale's elements into zeros. Those of blocks are found when blocks are quantised."""
    if fp8.kind == "blockwise":
        return
    x, (rows, k) = view.rows, view.rows.shape
    _largest[_grid(rows, k, *AMAX_TILE)](
        x, out.view(torch.int32), rows, k, *x.stride(), BY_ROW=fp8.kind == "rowwise", R=AMAX_TILE[0],
        K=AMAX_TILE[1], num_warps=_WARPS,
    )  # fmt: skip


def quantised(fp8: Fp8, view: OperandView, largest: torch.Tensor) -> Operand:
    """`largest`: the amax values; for blocks, only memory for their scales."""
    x, (rows, k) = view.rows, view.rows.shape
    data = torch.empty(rows, k, dtype=FORMATS[view.format], device=x.device)
    args = (rows, k, *x.stride(), LARGEST[view.format], TINY)
    if fp8.kind == "blockwise":
        scale, tile = largest, (fp8.block if view.square else TILE[0], fp8.block)
        _quantise_blocks[_grid(rows, k, *tile)](
            x,
            data,
            scale,
            *args,
            POWERS=fp8.powers_of(view.format),
            SQUARE=view.square,
            R=tile[0],
            K=tile[1],
            num_warps=_WARPS * (1 + view.square),
        )
    else:
        scale = torch.empty_like(largest)
        _quantise[_grid(rows, k, *TILE)](
            x, data, scale, largest.view(torch.int32), *args, POWERS=fp8.powers_of(view.format),
            BY_ROW=fp8.kind == "rowwise", R=TILE[0], K=TILE[1], num_warps=_WARPS,
        )  # fmt: skip
    return Operand(data, as_shared(fp8, view, scale))


def quantise_into(
    name: Format, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor
) -> None:
    """Quantise numbers [n] that share a scale into `out`. The workspace is not used."""
    grid = (tiles(len(values), _FLAT),)
    _quantise_flat[grid](values, out, scale, len(values), LARGEST[name], SIZE=_FLAT, num_warps=_WARPS)


def _grid(rows: int, k: int, high: int, wide: int) -> tuple[int, int]:
    return tiles(rows, high), tiles(k, wide)


TRITON = Quantiser(put_largest, quantised, quantise_into, "triton")
