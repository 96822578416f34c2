"""Weight gradients as products of 16-bit factors that write an fp32 bucket, unrounded and without a temporary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, in_turn, put, put_product
from penteract.engine.kernels.loss import logits_weight
from penteract.ops.tape import Site

_NARROW = (torch.bfloat16, torch.float16)


def is_wide(into: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether a factor has 16 bits and the bucket 32."""
    return into.dtype == torch.float32 and a.dtype in _NARROW


def wide_product(aten: Any, into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> Bound:
    """What writes or adds a @ b, without a temporary for the product. `aten`: `torch.ops.aten`, on a GPU."""
    if not is_wide(into, a):
        return partial(put_product, into, a, b, add)
    if add:
        return partial(aten.addmm.dtype_out, into, a, b, torch.float32, out=into)
    return partial(aten.mm.dtype_out, a, b, torch.float32, out=into)


def put_wide_product(aten: Any, into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Write or add a @ b so."""
    wide_product(aten, into, a, b, add)()


def _linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x·wᵀ, and a bias."""
    out = _rows(outs[0])
    product = partial(torch.mm, _rows(ins[0]), weights[0].t(), out=out)
    return in_turn(product, *[partial(out.add_, bias) for bias in weights[1:]])


def _linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """g·w."""
    return partial(torch.mm, _rows(ins[0]), weights[0], out=_rows(outs[0]))


def _linear_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """gᵀ·x [N, K], and the sum of g over tokens for a bias [N]."""
    x, g = map(_rows, ins)
    product = wide_product(aten, into[0], g.t(), x, add)
    return in_turn(product, *[partial(_put_sum, y, g, add) for y in into[1:]])


def _put_sum(into: torch.Tensor, g: torch.Tensor, add: bool) -> None:
    put(into, g.sum(0, dtype=into.dtype), add)


def _logits_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """gᵀ·x of all columns at once; where the bucket takes no such product, of some at a time."""
    if is_wide(into[0], ins[1]):
        return _linear_weight(aten, env, site, ins, into, add)
    return partial(logits_weight, env, site, ins, into, add)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])  # never a copy: a bound call would keep it


def wide_products(aten: Any) -> dict[str, TorchKernel]:
    """Kernels of the ops whose weight gradient is such a product."""
    return {
        "linear": TorchKernel(Bindable(_linear), Bindable(_linear_input), Bindable(partial(_linear_weight, aten))),
        "logits": TorchKernel(Bindable(_linear), Bindable(_linear_input), Bindable(partial(_logits_weight, aten))),
    }


WIDE_PRODUCT = wide_products(torch.ops.aten)
