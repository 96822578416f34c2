"""Reference kernels of gate and up projections with SwiGLU: what their parts do, one after the other."""

from __future__ import annotations

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


GLU = {"merged_glu": TorchKernel(merged_glu, merged_glu_input, merged_linear_weight)}
