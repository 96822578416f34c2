"""Reference kernels on registers with room for more rows than experts have: the device alone knows where these end.
Rows behind that are computed with the others, of whatever lies there; no result is made of them."""

from __future__ import annotations

import torch

from penteract.engine.kernels import dense
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.moe import experts
from penteract.ops.tape import Site


def _behind(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of so many rows are behind those that there are, [rows, 1]."""
    return torch.arange(rows, device=offsets.device).view(-1, 1) >= offsets[-1]


def permute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Token copies in the order of this rank's experts: [s, B, D] -> [rows, D]."""
    experts.permute(env, site, ins[:2], weights, outs)


def permute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The sum of the gradients of a token's copies here."""
    order, offsets, g = ins
    token = order // site.attrs["top_k"]
    rows = g.masked_fill(_behind(offsets, len(g)), 0)
    outs[0].zero_().view(-1, g.shape[1]).index_add_(0, token[: len(g)], rows)


def swiglu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(gate)·up, [rows, F]."""
    dense.swiglu(env, site, ins[:2], weights, outs)


def swiglu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of gate and up, from both and g."""
    gate, up, _, g = ins
    dense.swiglu_input(env, site, [gate, up, g], weights, outs)


def unpermute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Each token's sum of its copies here, weighted: [rows, D] -> [s, B, D]."""
    y, w, order, offsets = ins
    rows = y.masked_fill(_behind(offsets, len(y)), 0)
    experts.unpermute(env, site, [rows, w, order], weights, outs)


def unpermute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Gradients of the copies and of the weights; of a weight whose copy another rank has, zero."""
    y, w, order, offsets, g = ins
    torch.index_select(g.view(-1, y.shape[1]), 0, (order // site.attrs["top_k"])[: len(y)], out=outs[0])
    outs[1].zero_()
    order = order[: len(y)]
    sums = (outs[0] * y).sum(-1)
    outs[1].view(-1)[order] = sums.masked_fill_(_behind(offsets, len(y)).view(-1), 0)
    del sums
    outs[0].mul_(w.reshape(-1)[order][:, None])


PADDED_ROWS = {
    "padded_permute": TorchKernel(permute, permute_input),
    "padded_swiglu": TorchKernel(swiglu, swiglu_input),
    "padded_unpermute": TorchKernel(unpermute, unpermute_input),
}
