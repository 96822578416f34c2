"""Reference kernels of gate and up projections with SwiGLU, and of those with the linear layer after them: what their
parts do, one after the other."""

from __future__ import annotations

import torch

from penteract.engine.kernels.dense import linear, linear_input
from penteract.engine.kernels.fusions import (
    merged_linear,
    merged_linear_input,
    merged_linear_weight,
    put_swiglu,
    put_swiglu_input,
)
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def merged_glu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(x·w1ᵀ)·(x·w2ᵀ), and both products side by side."""
    out, packed = outs
    merged_linear(env, site, ins, weights, [packed])
    put_swiglu(packed, out)


def merged_glu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x, and those of gate and up, side by side."""
    packed, g = ins
    gradient, slopes = outs
    put_swiglu_input(packed, g, slopes)
    merged_linear_input(env, site, [slopes], weights, [gradient])


def glu_linear(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """(silu(x·w1ᵀ)·(x·w2ᵀ))·w3ᵀ, and the first two products."""
    out, packed = outs
    between = _half(packed)
    merged_glu(env, site, ins, weights[:2], [between, packed])
    linear(env, site, [between], weights[2:], [out])


def glu_linear_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The gradient of x, and those of gate and up; SwiGLU's result where it is asked for."""
    packed, g = ins
    between = _half(packed)
    linear_input(env, site, [g], weights[2:], [between])
    merged_glu_input(env, site, [packed, between], weights[:2], outs[:2])
    for again in outs[2:]:
        put_swiglu(packed, again)


def _half(packed: torch.Tensor) -> torch.Tensor:
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2)


GLU = {
    "merged_glu": TorchKernel(merged_glu, merged_glu_input, merged_linear_weight),
    "glu_linear": TorchKernel(glu_linear, glu_linear_input),
}
