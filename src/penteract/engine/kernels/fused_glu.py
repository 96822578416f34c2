"""Gate and up projections whose product applies SwiGLU as it stores, and down's product back through it, by the package
quack.

Its tiles hold gate and up of a feature next to each other, but what they store lies side by side, as the weights do. So
the other products are those of `merged_linear`.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any, Protocol

import torch

from penteract.engine.kernels.glu import glu_linear
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.moe.grouped_experts import DYNAMIC, Tile, config, quack_without_gpu
from penteract.engine.kernels.triton.fusions import as_one, fusions
from penteract.engine.kernels.triton.swiglu import put_swiglu_input
from penteract.errors import Bug
from penteract.ops.tape import Site

_TILE: Tile = (128, 192, True)  # the fastest at widths of 2,048 and 4,096 both ways, and faster there than cuBLAS's


class GluProducts(Protocol):
    """Products with SwiGLU where they store. Gate and up [T, F], and their gradients, are columns of wider rows."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        """x [T, D], w [2·F, D], gate before up -> gate, up, and `out` [T, F]."""
        ...

    def slopes(
        self, g: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, of_gate: torch.Tensor,
        of_up: torch.Tensor, again: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """g [T, E], the weight [E, F] that SwiGLU's result was multiplied by -> the gradients of gate and up, and that
        result `again` [T, F]."""
        ...


@cache
def gated() -> Any:
    """quack's product with SwiGLU, of gate and up next to each other; imported when a run needs it."""
    swiglu, values = import_module("quack.activation").swiglu, import_module("quack.epilogue.math")

    def store_swiglu(acc: Any) -> dict[str, Any]:
        gate, up = values.unpack(acc)
        return {"gate": gate, "up": up, "out": swiglu(gate, up)}

    epilogue = import_module("quack.epilogue.frontend").gemm_epilogue
    return epilogue(outputs=("gate", "up", "out"), mode="acc_pair")(store_swiglu)


@cache
def gated_back() -> Any:
    """quack's product with the gradients of gate and up from the one that it computes."""
    slopes_of = import_module("quack.activation").dswiglu

    def store_slopes(acc: Any, c: Any, up: Any) -> dict[str, Any]:
        of_gate, of_up, _ = slopes_of(c, up, acc)
        return {"D": of_gate, "of_up": of_up}

    return import_module("quack.epilogue.frontend").gemm_epilogue(outputs=("of_up",))(store_slopes)


@cache
def gated_back_again() -> Any:
    """The same, which stores SwiGLU's result, too."""
    slopes_of = import_module("quack.activation").dswiglu

    def store_both(acc: Any, c: Any, up: Any) -> dict[str, Any]:
        of_gate, of_up, again = slopes_of(c, up, acc)
        return {"D": of_gate, "of_up": of_up, "again": again}

    return import_module("quack.epilogue.frontend").gemm_epilogue(outputs=("of_up", "again"))(store_both)


def _load() -> None:
    """Import the package."""
    gated()
    gated_back()
    gated_back_again()
    config(_TILE)


class QuackGlu:
    """The products of package quack."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        """It reads the rows of the weight in turn: gate, up, gate, up."""
        gated()(
            x, w.t(), None, out={"gate": gate, "up": up, "out": out}, store_d=False, config=config(_TILE), tuned=False,
            dynamic_scheduler=DYNAMIC, concat_layout=("B",),
        )  # fmt: skip

    def slopes(
        self, g: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, of_gate: torch.Tensor,
        of_up: torch.Tensor, again: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """The gradient of SwiGLU's result stays in registers."""
        product, out = gated_back(), {"D": of_gate, "of_up": of_up}
        if again is not None:
            product, out = gated_back_again(), {**out, "again": again}
        product(g, w, gate, up=up, out=out, config=config(_TILE), tuned=False, dynamic_scheduler=DYNAMIC)


def _forward(by: GluProducts, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """silu(x·w1ᵀ)·(x·w2ᵀ), and both products side by side."""
    whole = as_one(weights)
    if whole is None:
        raise Bug("KERNEL", f"the weights of {site} do not lie behind each other")
    out, packed = map(_rows, outs)
    gate, up = packed.chunk(2, -1)
    by.forward(_rows(ins[0]), whole, gate, up, out)


def glus(aten: Any, by: GluProducts) -> dict[str, TorchKernel]:
    """The kernels, over the operators of `aten` and products with SwiGLU."""
    linear = fusions(aten)["merged_linear"]
    assert linear.input_gradient is not None
    of_linear = linear.input_gradient

    def input_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        (packed, g), (gradient, slopes) = ins, outs
        put_swiglu_input(*packed.chunk(2, -1), g, *slopes.chunk(2, -1))
        of_linear(env, site, [slopes], weights, [gradient])

    def joint_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        (packed, g), (gradient, slopes, *made) = map(_rows, ins), outs
        again = _rows(made[0]) if made else None
        (gate, up), (of_gate, of_up) = packed.chunk(2, -1), _rows(slopes).chunk(2, -1)
        by.slopes(g, weights[2], gate, up, of_gate, of_up, again)
        of_linear(env, site, [slopes], weights[:2], [gradient])

    return {
        "merged_glu": TorchKernel(partial(_forward, by), input_gradient, linear.weight_gradient),
        "glu_linear": TorchKernel(glu_linear, joint_gradient),
    }


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


WITHOUT_GPU = {"QUACK": quack_without_gpu(_load)}
PACKAGES = {"QUACK": _load}  # imported before a run's first step
QUACK = glus(torch.ops.aten, QuackGlu())
