"""Fused attention on GPUs: cuDNN's, over whole sequences. It takes strides, so no batch size needs a transposed
copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from penteract.engine.kernels.fused_attention.chunk_order import AttentionLayout, read_by
from penteract.engine.kernels.fused_attention.normed_attention import ON_GPU, normed
from penteract.engine.kernels.fusions import packed, rotate_on_gpu_
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def _by_head(x: torch.Tensor, size: int) -> torch.Tensor:
    """[s, B, H·C] -> [B, H, s, C], a view."""
    return x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)


def _forward(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    size, places, scale = int(site.attrs["head_size"]), AttentionLayout.of(env, site), float(site.attrs["scale"])
    read = read_by(places.keys, ins[:3], partial(_by_head, size=size))
    o, log_sum = outs[0].unflatten(-1, (-1, size)), outs[1]

    def run() -> None:
        made = aten._scaled_dot_product_cudnn_attention(*read(), None, True, 0.0, True, False, scale=scale)
        places.queries.put(made[0].permute(2, 0, 1, 3), o)
        places.queries.put(made[1].view(log_sum.shape), log_sum, 2)

    return run


def _input_gradient(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    q, k, v, _, _, _, o, log_sum, g = ins
    size, order, scale = int(site.attrs["head_size"]), AttentionLayout.of(env, site).queries, float(site.attrs["scale"])
    read = read_by(order, (g, q, k, v, o), partial(_by_head, size=size))
    logs = read_by(order, (log_sum,), lambda x: x[..., None], 2)
    into = [x.unflatten(-1, (-1, size)) for x in outs]
    random = partial(torch.empty, (), dtype=torch.int64, device=q.device)

    def run() -> None:
        tensors = read()
        made = aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *logs(), random(), random(), None, None, None, tensors[1].shape[2], tensors[2].shape[2], 0.0,
            True, scale=scale,
        )  # fmt: skip
        for y, there in zip(made, into, strict=True):
            order.put(y.permute(2, 0, 1, 3), there)

    return run


def cudnn(aten: Any) -> TorchKernel:
    """The kernel, calling the operators of `aten`."""
    return TorchKernel(Bindable(partial(_forward, aten)), Bindable(partial(_input_gradient, aten)))


_KERNEL = cudnn(torch.ops.aten)
CUDNN = {
    "attention": _KERNEL,
    "packed_attention": packed(_KERNEL, rotate_on_gpu_),
    "normed_attention": normed(_KERNEL, ON_GPU),
}
