"""Gate and up projections whose product applies SwiGLU as it stores, by the package quack.

Its tiles hold gate and up of a feature next to each other, so what backward reads has them in turn: gate, up, gate, up.
The gradients lie side by side, as the weights do, so the other products are those of `merged_linear`.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.moe.grouped_experts import Tile, config
from penteract.engine.kernels.triton.fusions import as_one, fusions
from penteract.engine.kernels.triton.strides import row_count, row_stride
from penteract.engine.kernels.triton.swiglu import place, tiles
from penteract.errors import Bug
from penteract.ops.tape import Site

Gated = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # x, w, gate and up, out

_TILE: Tile = (128, 192, True)  # the fastest of five at widths of 2,048 and 4,096, and faster there than cuBLAS's


@cache
def _product() -> Any:
    """quack's product with SwiGLU in its epilogue, imported when a run first computes with it."""
    library = import_module("quack.epilogue.library")
    return library.linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)


def by_quack(x: torch.Tensor, w: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, D], w [2·F, D], gate before up -> `packed` [T, 2·F], gate and up in turn, and `out` [T, F]."""
    _product()(
        x, w.t(), None, out={"D": packed, "mAuxOut": out}, store_d=True, config=config(_TILE), tuned=False,
        dynamic_scheduler=False, concat_layout=("B",),
    )  # fmt: skip


@triton.jit
def _slopes(packed, g, slopes, rows, width, packed_row, g_row, slopes_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, here = place(rows, width, ROWS, COLUMNS)
    pair = (tl.program_id(1) * COLUMNS * 2 + tl.arange(0, 2 * COLUMNS))[None, :]
    both = tl.load(packed + row * packed_row + pair, (row < rows) & (pair < 2 * width), other=0.0)
    gate, up = tl.split(tl.reshape(both, (ROWS, COLUMNS, 2)))
    a, b = gate.to(tl.float32), up.to(tl.float32)
    d = tl.load(g + row * g_row + column, here, other=0.0).to(tl.float32)
    share = tl.sigmoid(a)
    silu = a * share
    by_gate = d * b * (share + silu * (1.0 - share))
    at = slopes + row * slopes_row + column
    tl.store(at, by_gate.to(slopes.dtype.element_ty), here)
    tl.store(at + width, (d * silu).to(slopes.dtype.element_ty), here)


def put_slopes(packed: torch.Tensor, g: torch.Tensor, slopes: torch.Tensor) -> None:
    """Gate and up in turn [.., 2·F] and the gradient g [.., F] -> their gradients side by side [.., 2·F]."""
    grid, shape = tiles(g)
    _slopes[grid](packed, g, slopes, row_count(g), g.shape[-1], *map(row_stride, (packed, g, slopes)), **shape)


def _forward(gated: Gated, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(x·w1ᵀ)·(x·w2ᵀ), and both products in turn."""
    whole = as_one(weights)
    if whole is None:
        raise Bug("KERNEL", f"the weights of {site} do not lie behind each other")
    out, packed = outs
    gated(_rows(ins[0]), whole, _rows(packed), _rows(out))


def glus(aten: Any, gated: Gated) -> dict[str, TorchKernel]:
    """The kernel, over the operators of `aten` and a gated product."""
    linear = fusions(aten)["merged_linear"]
    assert linear.input_gradient is not None
    of_linear = linear.input_gradient

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        gradient, slopes = outs
        put_slopes(*ins, slopes)
        of_linear(env, site, [slopes], weights, [gradient])

    return {"merged_glu": TorchKernel(partial(_forward, gated), input_gradient, linear.weight_gradient)}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


QUACK = glus(torch.ops.aten, by_quack)
