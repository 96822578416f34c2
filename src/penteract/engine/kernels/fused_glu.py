"""Gate and up projections whose product applies SwiGLU as it stores, by the package quack.

Its tiles hold gate and up of a feature next to each other, so what backward reads has them in turn: gate, up, gate, up.
The gradients lie side by side, as the weights do, so the other products are those of `merged_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.moe.grouped_experts import Tile, config
from penteract.engine.kernels.triton.fusions import as_one, fusions
from penteract.engine.kernels.triton.swiglu import put_slopes
from penteract.errors import Bug
from penteract.ops.tape import Site

Gated = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # x, w, gate and up, out

_TILE: Tile = (128, 192, True)  # the fastest of five at widths of 2,048 and 4,096, and faster there than cuBLAS's


@cache
def _product() -> Any:
    """quack's product with SwiGLU in its epilogue, imported when a run needs it."""
    library = import_module("quack.epilogue.library")
    return library.linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)


def load() -> None:
    """Import the package, before a run's first step."""
    _product()
    config(_TILE)


def by_quack(x: torch.Tensor, w: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, D], w [2·F, D], gate before up -> `packed` [T, 2·F], gate and up in turn, and `out` [T, F]."""
    _product()(
        x, w.t(), None, out={"D": packed, "mAuxOut": out}, store_d=True, config=config(_TILE), tuned=False,
        dynamic_scheduler=False, concat_layout=("B",),
    )  # fmt: skip


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
        (dy, packed), (gradient, slopes) = ins, outs
        put_slopes(dy, packed, slopes)
        of_linear(env, site, [slopes], weights, [gradient])

    return {"merged_glu": TorchKernel(partial(_forward, gated), input_gradient, linear.weight_gradient)}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


QUACK = glus(torch.ops.aten, by_quack)
