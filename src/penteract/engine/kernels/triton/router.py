"""Routing by products of 16-bit factors, as `narrow_router.py` declares it. The choice of experts is plain torch."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put
from penteract.engine.kernels.moe import experts
from penteract.engine.kernels.wide_product import is_wide, put_wide_product
from penteract.ops.declarations.moe.narrow_router import PARTS
from penteract.ops.tape import Site

_TILE = 4096  # elements of a program
_COLUMNS = 128  # of it, at most


@triton.jit
def _split(x, parts, rows, X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, X] in fp32 -> parts [rows, 3·X]: the nearest number of 16 bits, that of the rest, that of its rest. Each
    rest is exact in fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (row < rows) & (c < X)
    rest = tl.load(x + row * X + c, here, other=0.0)
    for part in tl.static_range(3):
        nearest = rest.to(parts.dtype.element_ty)
        tl.store(parts + row * (3 * X) + part * X + c, nearest, here)
        rest -= nearest.to(tl.float32)


def split(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [.., X] in fp32, contiguous -> [rows, 3·X] of 16 bits: three parts of each row, side by side, whose sum it
    is."""
    width = x.shape[-1]
    rows = x.numel() // width
    parts = torch.empty(rows, PARTS * width, dtype=dtype, device=x.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    some = _TILE // columns
    _split[triton.cdiv(rows, some), triton.cdiv(width, columns)](
        x, parts, rows, X=width, ROWS=some, COLUMNS=columns, num_warps=4
    )
    return parts


def _router(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """x [S, B, D] -> weights and experts [S, B, k], scores and choices [S, B, X]."""
    x, logits = _rows(ins[0]), _rows(outs[2])
    if is_wide(logits, x):
        put_wide_product(aten, logits, x, weights[0].t(), False)
        experts.choose_experts(env, site, outs)
    else:
        experts.router(env, site, ins, weights, outs)


def _router_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x; keeps that of the logits."""
    (out, slope), w = outs, weights[0]
    if not is_wide(slope, w):
        experts.router_input(env, site, ins, weights, outs)
        return
    experts.put_logits_gradient(env, site, ins, slope)
    torch.mm(split(slope, w.dtype), w.repeat(PARTS, 1), out=_rows(out))


def _router_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x, [X, D], of the logits' gradient: that of each part, summed from the smallest up."""
    x, slope = _rows(ins[0]), ins[1]
    if not is_wide(slope, x):
        experts.router_weight(env, site, ins, into, add)
        return
    parts = split(slope, x.dtype)
    made = torch.empty(parts.shape[1], x.shape[1], dtype=slope.dtype, device=x.device)
    put_wide_product(aten, made, parts.t(), x, False)
    first, second, third = made.chunk(PARTS)
    put(into[0], third.add_(second).add_(first), add)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def routers(aten: Any) -> dict[str, TorchKernel]:
    """The kernel, over the operators of `aten`."""
    return {"router": TorchKernel(partial(_router, aten), _router_input, partial(_router_weight, aten))}


ROUTER = routers(torch.ops.aten)
