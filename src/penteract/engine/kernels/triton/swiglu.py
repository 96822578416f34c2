"""SwiGLU in one pass: what `engine/kernels/dense.py` says in plain torch. Rows may be some columns of wider ones."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.strides import columns, row_count, row_stride, tiles
from penteract.ops.tape import Site

_TILE = 2048  # elements of each tensor in a program: 16 of each thread
_WARPS = 4
_ROUTED = ("rows",)  # which may be other ones in every step: no kernel is compiled for some of them


@triton.jit
def _place(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Rows and columns of a tile, and which are there. `PADDED`: `rows` is where their number lies."""
    if PADDED:
        rows = tl.load(rows)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=_ROUTED)
def _forward(
    gate, up, out, rows, width, gate_row, up_row, out_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    row, column, here = _place(rows, width, ROWS, COLUMNS, PADDED)
    a = tl.load(gate + row * gate_row + column, here, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, here, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=_ROUTED)
def _input(
    gate, up, g, of_gate, of_up, rows, width, gate_row, up_row, g_row, of_gate_row, of_up_row, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, column, here = _place(rows, width, ROWS, COLUMNS, PADDED)
    a = tl.load(gate + row * gate_row + column, here, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, here, other=0.0).to(tl.float32)
    d = tl.load(g + row * g_row + column, here, other=0.0).to(tl.float32)
    share = tl.sigmoid(a)
    silu = a * share
    by_gate = d * b * (share + silu * (1.0 - share))
    tl.store(of_gate + row * of_gate_row + column, by_gate.to(of_gate.dtype.element_ty), here)
    tl.store(of_up + row * of_up_row + column, (d * silu).to(of_up.dtype.element_ty), here)


def _rows(x: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor | int:
    """Their number, or where it lies."""
    return ends[0][-1:] if ends else row_count(x)


def _tiles(x: torch.Tensor, *ends: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    width = x.shape[-1]
    wide = columns(width)
    high = max(1, _TILE // wide)
    grid = tiles(row_count(x), high), tiles(width, wide)
    return grid, {"ROWS": high, "COLUMNS": wide, "PADDED": bool(ends), "num_warps": _WARPS}


@Bindable
def put_swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, *ends: torch.Tensor) -> Bound:
    """silu(gate)·up [.., F]. `ends`: offsets of padded rows, of which the last says how many there are."""
    grid, shape = _tiles(gate, *ends)
    every = (gate, up, out)
    return bind(_forward, grid, *every, _rows(gate, *ends), gate.shape[-1], *map(row_stride, every), **shape)


@Bindable
def put_swiglu_input(
    gate: torch.Tensor, up: torch.Tensor, g: torch.Tensor, of_gate: torch.Tensor, of_up: torch.Tensor,
    *ends: torch.Tensor,
) -> Bound:  # fmt: skip
    """Gradients of gate and up [.., F], from both and g. They may be written over gate and up. `ends`: as above."""
    every = (gate, up, g, of_gate, of_up)
    grid, shape = _tiles(gate, *ends)
    return bind(_input, grid, *every, _rows(gate, *ends), gate.shape[-1], *map(row_stride, every), **shape)


@Bindable
def swiglu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """silu(gate)·up, [S, B, F]. Shazeer 2020 (2002.05202)."""
    gate, up, *ends = ins
    return put_swiglu.bind(gate, up, *outs, *ends)


@Bindable
def swiglu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Gradients of gate and up, from both and g."""
    gate, up, *ends, g = ins
    return put_swiglu_input.bind(gate, up, g, *outs, *ends)


SWIGLU = dict.fromkeys(("swiglu", "padded_swiglu"), TorchKernel(swiglu, swiglu_input))
