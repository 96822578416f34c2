"""Fused attention on GPUs: cuDNN's, over whole sequences. It takes strides, so no batch size needs a transposed
copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from penteract.engine.kernels.fused_attention.chunk_order import AttentionLayout
from penteract.engine.kernels.fused_attention.normed_attention import ON_GPU, normed
from penteract.engine.kernels.fusions import packed, rotate_on_gpu_
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def _by_head(x: torch.Tensor, size: int) -> torch.Tensor:
    """[s, B, H·C] -> [B, H, s, C], a view."""
    return x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)


def _forward(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    size, places = int(site.attrs["head_size"]), AttentionLayout.of(env, site)
    q, k, v = (_by_head(places.keys.restore(x), size) for x in ins[:3])
    made = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=float(site.attrs["scale"])
    )
    places.queries.put(made[0].permute(2, 0, 1, 3), outs[0].unflatten(-1, (-1, size)))
    places.queries.put(made[1].view(outs[1].shape), outs[1], 2)


def _input_gradient(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, _, _, _, o, log_sum, g = ins
    size, order = int(site.attrs["head_size"]), AttentionLayout.of(env, site).queries
    q, k, v, o, g = (_by_head(order.restore(x), size) for x in (q, k, v, o, g))
    log_sum = order.restore(log_sum, 2)[..., None]
    random = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
    made = aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, o, log_sum, *random, None, None, None, q.shape[2], k.shape[2], 0.0, True,
        scale=float(site.attrs["scale"]),
    )  # fmt: skip
    for y, into in zip(made, outs, strict=True):
        order.put(y.permute(2, 0, 1, 3), into.unflatten(-1, (-1, size)))


def cudnn(aten: Any) -> TorchKernel:
    """The kernel, calling the operators of `aten`."""
    return TorchKernel(partial(_forward, aten), partial(_input_gradient, aten))


_KERNEL = cudnn(torch.ops.aten)
CUDNN = {
    "attention": _KERNEL,
    "packed_attention": packed(_KERNEL, rotate_on_gpu_),
    "normed_attention": normed(_KERNEL, ON_GPU),
}
