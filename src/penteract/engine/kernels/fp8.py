"""Linears whose products are of FP8 codes: which scales, which codes. What multiplies them is given.

x [T, D], w [F, D], g [T, F]. Every product is out [m, n] = a [m, k] · b [n, k]ᵀ of operands whose codes lie along k:

    forward          x           w          sums over D
    input_gradient   g           wᵀ         sums over F
    weight_gradient  gᵀ          xᵀ         sums over T

`quantise.py` makes the codes. A weight that was gathered as codes comes with its scale
(`engine/executor/quantised_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel, put
from penteract.engine.kernels.quantise import TORCH, Look, Operand, Quantiser, scale_count
from penteract.ops.declarations.fp8 import aligned, scaled_linear
from penteract.ops.tape import Site

_X, _W, _G = range(3)  # places in what is remembered of a linear

Product = Callable[[Fp8, Operand, Operand, torch.Tensor, bool], None]  # recipe, a, b, out, of a forward pass


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class Scaled:
    """The three phases, over what makes codes and what multiplies them."""

    product: Product
    quantiser: Quantiser

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """x·wᵀ (+ b) of quantised operands."""
        fp8, out = site.attrs["fp8"], _flat(outs[0])
        a, b = Look(_X, _flat(ins[0]), fp8.operand), Look(_W, weights[0], fp8.operand, square=True)
        self.product(fp8, *self._operands(env, site, "forward", a, b), out, True)
        if len(weights) == 2:
            out.add_(weights[1])

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """g·w of quantised operands."""
        fp8 = site.attrs["fp8"]
        a, b = Look(_G, _flat(ins[0]), fp8.gradient), Look(_W, weights[0].t(), fp8.operand, square=True)
        self.product(fp8, *self._operands(env, site, "input_gradient", a, b), _flat(outs[0]), False)

    def weight_gradient(self, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        """gᵀ·x of quantised operands."""
        fp8, x, g = site.attrs["fp8"], _flat(ins[0]), _flat(ins[1])
        a, b = Look(_G, g.t(), fp8.gradient), Look(_X, x.t(), fp8.operand)
        operands = self._operands(env, site, "weight_gradient", a, b)
        made = torch.empty(into[0].shape, dtype=x.dtype, device=x.device)
        self.product(fp8, *operands, made, False)
        put(into[0], made, add)
        del operands, made
        if len(into) == 2:
            put(into[1], g.sum(0, dtype=into[1].dtype), add)

    def _operands(self, env: Env, site: Site, phase: str, a: Look, b: Look) -> tuple[Operand, Operand]:
        fp8, how = site.attrs["fp8"], self.quantiser
        came = fp8.gather and b.role == _W
        first, second = scale_count(fp8, a), 0 if came else scale_count(fp8, b)
        begin = aligned(first)
        both = torch.zeros(begin + second, dtype=torch.float32, device=a.rows.device)
        scales = both[:first], both[begin:]
        if fp8.kind == "delayed":
            self._remembered(env, site, phase, (a, b), scales)
        else:
            for look, scale in zip((a, b), scales, strict=True):
                if len(scale):
                    how.put_largest(fp8, look, scale)
            if axis := _axis(site, phase):
                env.agree(axis, both)
        quantised = how.quantised(fp8, a, scales[0])
        if came:
            return quantised, Operand(b.rows.contiguous(), env.scales[site.params[0]])
        return quantised, how.quantised(fp8, b, scales[1])

    def _remembered(
        self, env: Env, site: Site, phase: str, looks: tuple[Look, Look], out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """The largest of past steps; of this one, so far as it has gone, where there are none. What a phase is the
        first to look at is remembered for steps to come."""
        past, seen = env.past[site.params[0]], env.seen[site.params[0]]
        new = {"forward": (_X, _W), "input_gradient": (_G,), "weight_gradient": ()}[phase]
        for look, into in zip(looks, out, strict=True):
            role = slice(look.role, look.role + 1)
            if look.role in new:
                self.quantiser.put_largest(site.attrs["fp8"], look, into)
                torch.maximum(seen[role], into, out=seen[role])
            torch.where(past[role] > 0, past[role], seen[role], out=into)


def _axis(site: Site, phase: str) -> str:
    """Whose ranks share scales; as declared."""
    shapes = [s.shape for s in site.ins]
    return scaled_linear(site.attrs["fp8"]).agreed(phase, shapes, site.weights, site.attrs)[0]  # type: ignore[arg-type]


# ---- products ----------------------------------------------------------------------------------------------------


def emulated(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
    """On any device: codes as numbers, their products exact, sums in fp32 (fp64 where `out` is)."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if fp8.kind == "blockwise":
        out.copy_(_numbers(fp8, a, wide) @ _numbers(fp8, b, wide).t())
        return
    made = a.codes.to(wide) @ b.codes.to(wide).t()
    out.copy_(made.mul_(a.scale.to(wide)[:, None]).mul_(b.scale.to(wide)))


def _numbers(fp8: Fp8, x: Operand, wide: torch.dtype) -> torch.Tensor:
    rows, k = x.codes.shape
    square = x.scale.shape == (rows // fp8.block, k // fp8.block)
    scale = x.scale.repeat_interleave(fp8.block, 0) if square else x.scale.t()
    blocks = x.codes.to(wide).view(rows, -1, fp8.block)
    return (blocks * scale.to(wide)[:, :, None]).view(rows, k)


def real(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
    """On a GPU with FP8 units, by cuBLASLt. The second operand lies column by column; scales of blocks lie along the
    rows that they are for. Sums of forward passes may be kept in fewer bits, those of gradients never are."""
    n, k = b.codes.shape
    if fp8.kind == "rowwise":
        scales, fast = (a.scale[:, None], b.scale[None]), forward
    elif fp8.kind != "blockwise":
        scales, fast = (a.scale, b.scale), forward
    else:
        second, fast = b.scale, False
        if second.shape == (n // fp8.block, k // fp8.block):  # squares, in rows that are multiples of 16 bytes
            second = second.t()
            if k // fp8.block % 4:
                second = second.repeat_interleave(fp8.block, 1)
        scales = (a.scale.t(), second)
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - no public name yet
    product(a.codes, b.codes.t(), *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def scaled(product: Product, quantiser: Quantiser = TORCH) -> TorchKernel:
    """The kernel, over what multiplies and what makes codes."""
    how = Scaled(product, quantiser)
    return TorchKernel(how.forward, how.input_gradient, how.weight_gradient)


EMULATED = {"linear": scaled(emulated)}
FP8 = {"linear": scaled(real)}
