"""Linear layers in FP8: scaling and quantisation of operands. The product itself is a parameter.

x [T, D], w [F, D], g [T, F]. Every product is out [m, n] = a [m, k] · b [n, k]ᵀ, with operands contiguous along k:

    forward          x           w          sums over D
    input_gradient   g           wᵀ         sums over F
    weight_gradient  gᵀ          xᵀ         sums over T

`quantise.py` quantises. A weight that was all-gathered in FP8 comes with its scale
(`engine/state/quantised_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put
from penteract.engine.kernels.quantised.cublaslt import multiplied
from penteract.engine.kernels.quantised.quantise import TORCH, Operand, OperandView, Quantiser, scale_count
from penteract.ops.declarations.quantised.fp8 import aligned, scaled_linear
from penteract.ops.tape import Site

_X, _W, _G = range(3)  # indices in the amax history of a linear layer

Product = Callable[[Fp8, Operand, Operand, torch.Tensor, bool], None]  # recipe, a, b, out, of a forward pass


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class ScaledLinearKernel:
    """The three phases of a linear layer, with a given product and quantiser."""

    product: Product
    quantiser: Quantiser

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """x·wᵀ (+ b) of quantised operands."""
        fp8, out = site.attrs["fp8"], _flat(outs[0])
        a, b = OperandView(_X, _flat(ins[0]), fp8.operand), OperandView(_W, weights[0], fp8.operand, square=True)
        self.product(fp8, *self._operands(env, site, "forward", a, b), out, True)
        if len(weights) == 2:
            out.add_(weights[1])

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """g·w of quantised operands."""
        fp8 = site.attrs["fp8"]
        a, b = OperandView(_G, _flat(ins[0]), fp8.gradient), OperandView(_W, weights[0].t(), fp8.operand, square=True)
        self.product(fp8, *self._operands(env, site, "input_gradient", a, b), _flat(outs[0]), False)

    def weight_gradient(self, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        """gᵀ·x of quantised operands."""
        fp8, x, g = site.attrs["fp8"], _flat(ins[0]), _flat(ins[1])
        a, b = OperandView(_G, g.t(), fp8.gradient), OperandView(_X, x.t(), fp8.operand)
        operands = self._operands(env, site, "weight_gradient", a, b)
        made = torch.empty(into[0].shape, dtype=x.dtype, device=x.device)
        self.product(fp8, *operands, made, False)
        put(into[0], made, add)
        del operands, made
        if len(into) == 2:
            put(into[1], g.sum(0, dtype=into[1].dtype), add)

    def _operands(self, env: Env, site: Site, phase: str, a: OperandView, b: OperandView) -> tuple[Operand, Operand]:
        fp8, quantiser = site.attrs["fp8"], self.quantiser
        gathered = fp8.gather and b.role == _W
        first, second = scale_count(fp8, a), 0 if gathered else scale_count(fp8, b)
        begin = aligned(first)
        both = torch.zeros(begin + second, dtype=torch.float32, device=a.rows.device)
        scales = both[:first], both[begin:]
        if fp8.kind == "delayed":
            self._put_delayed(env, site, phase, (a, b), scales)
        else:
            for view, scale in zip((a, b), scales, strict=True):
                if len(scale):
                    quantiser.put_largest(fp8, view, scale)
            if axis := _axis(site, phase):
                env.all_reduce_max(axis, both)
        quantised = quantiser.quantised(fp8, a, scales[0])
        if gathered:
            return quantised, Operand(b.rows.contiguous(), env.scales[site.params[0]])
        return quantised, quantiser.quantised(fp8, b, scales[1])

    def _put_delayed(
        self,
        env: Env,
        site: Site,
        phase: str,
        views: tuple[OperandView, OperandView],
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write the amax of past steps into `out`; without a history, that of this step so far. The first phase that
        reads an operand adds its amax to the history."""
        past, current = env.past_amax[site.params[0]], env.amax[site.params[0]]
        new = {"forward": (_X, _W), "input_gradient": (_G,), "weight_gradient": ()}[phase]
        for view, into in zip(views, out, strict=True):
            role = slice(view.role, view.role + 1)
            if view.role in new:
                self.quantiser.put_largest(site.attrs["fp8"], view, into)
                torch.maximum(current[role], into, out=current[role])
            torch.where(past[role] > 0, past[role], current[role], out=into)


def _axis(site: Site, phase: str) -> str:
    """The axis whose ranks share scales, from the op's declaration; "" if none do."""
    shapes = [s.shape for s in site.ins]
    return scaled_linear(site.attrs["fp8"]).all_reduced_max(phase, shapes, site.weights, site.attrs)[0]  # type: ignore[arg-type]


# ---- products ----------------------------------------------------------------------------------------------------


def emulated(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
    """On any device: quantised operands are widened, products are exact, and sums are in fp32 (fp64 if `out` is)."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if fp8.kind == "blockwise":
        out.copy_(_dequantised(fp8, a, wide) @ _dequantised(fp8, b, wide).t())
        return
    made = a.data.to(wide) @ b.data.to(wide).t()
    out.copy_(made.mul_(a.scale.to(wide)[:, None]).mul_(b.scale.to(wide)))


def _dequantised(fp8: Fp8, x: Operand, wide: torch.dtype) -> torch.Tensor:
    rows, k = x.data.shape
    square = x.scale.shape == (rows // fp8.block, k // fp8.block)
    scale = x.scale.repeat_interleave(fp8.block, 0) if square else x.scale.t()
    blocks = x.data.to(wide).view(rows, -1, fp8.block)
    return (blocks * scale.to(wide)[:, :, None]).view(rows, k)


def real(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
    """On a GPU with FP8 units, by cuBLASLt. The second operand is column-major; scales of blocks are contiguous along
    the rows that they scale. Forward products may accumulate in fewer bits. Where the recipe has those of
    gradients do so, too, the algorithm is our choice: it gains nothing where forward products alone do."""
    n, k = b.data.shape
    fast = fp8.kind != "blockwise" and (forward or fp8.fast_accumulation)
    if fp8.kind == "rowwise":
        scales = (a.scale[:, None], b.scale[None])
    elif fp8.kind != "blockwise":
        scales = (a.scale, b.scale)
        if fp8.fast_accumulation and multiplied(a, b, out):
            return
    else:
        second = b.scale
        if second.shape == (n // fp8.block, k // fp8.block):  # squares, in rows that are multiples of 16 bytes
            second = second.t()
            if k // fp8.block % 4:
                second = second.repeat_interleave(fp8.block, 1)
        scales = (a.scale.t(), second)
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - no public name yet
    product(a.data, b.data.t(), *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def scaled(product: Product, quantiser: Quantiser = TORCH) -> TorchKernel:
    """The kernel with a given product and quantiser."""
    kernel = ScaledLinearKernel(product, quantiser)
    return TorchKernel(kernel.forward, kernel.input_gradient, kernel.weight_gradient)


EMULATED = {"linear": scaled(emulated)}
FP8 = {"linear": scaled(real)}
