"""Weight gradients as products of 16-bit factors that write an fp32 bucket, unrounded and without a temporary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from penteract.engine.kernels.dense import linear, linear_input
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put, put_product
from penteract.engine.kernels.loss import logits_weight
from penteract.ops.tape import Site

_NARROW = (torch.bfloat16, torch.float16)


def is_wide(into: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether a factor has 16 bits and the bucket 32."""
    return into.dtype == torch.float32 and a.dtype in _NARROW


def put_wide_product(aten: Any, into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Write or add a @ b, without a temporary for the product. `aten`: `torch.ops.aten`, on a GPU."""
    if not is_wide(into, a):
        put_product(into, a, b, add)
    elif add:
        aten.addmm.dtype_out(into, a, b, torch.float32, out=into)
    else:
        aten.mm.dtype_out(a, b, torch.float32, out=into)


def _linear_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x [N, K], and the sum of g over tokens for a bias [N]."""
    x, g = (t.reshape(-1, t.shape[-1]) for t in ins)
    put_wide_product(aten, into[0], g.t(), x, add)
    if len(into) == 2:
        put(into[1], g.sum(0, dtype=into[1].dtype), add)


def _logits_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """gᵀ·x of all columns at once; where the bucket takes no such product, of some at a time."""
    if is_wide(into[0], ins[1]):
        _linear_weight(aten, env, site, ins, into, add)
    else:
        logits_weight(env, site, ins, into, add)


def wide_products(aten: Any) -> dict[str, TorchKernel]:
    """Kernels of the ops whose weight gradient is such a product."""
    return {
        "linear": TorchKernel(linear, linear_input, partial(_linear_weight, aten)),
        "logits": TorchKernel(linear, linear_input, partial(_logits_weight, aten)),
    }


WIDE_PRODUCT = wide_products(torch.ops.aten)
