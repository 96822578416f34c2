"""Gate and up projections with SwiGLU as one op, which the fusion "glu" puts in the place of `merged_linear` and
`packed_swiglu`; and one call back through it and the linear layer that reads it. Shazeer 2020 (2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, prod

from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    OpDeclaration,
    Product,
    Registers,
    Serves,
    Shape,
    Specs,
    WorkRates,
    linear_products,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.declarations.fusions import MergedLinear, OnePassPackedSwiglu, OneProduct, PackedSwiglu
from penteract.ops.spec import Spec, Widths
from penteract.units import Seconds


class MergedGlu(MergedLinear):
    """x [.., D], gate w1 [F, D], up w2 [F, D] -> silu(x·w1ᵀ)·(x·w2ᵀ) [.., F]; keeps gate and up [.., 2·F], side by
    side. Their gradients, side by side, are handed on to the weight gradient."""

    input_keeps = ("extra0",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows, features = ins[0].shape[:-1], weights[0][0]
        return (Spec((*rows, features)),), (Spec((*rows, 2 * features)),)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        return (Spec((*ins[0].shape[:-1], attrs["features"])),)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = super().cost(rates, call, widths, registers)
        return part, seconds + _passes(PackedSwiglu(), rates, call, widths)


class StoredGlu(MergedGlu):
    """A product whose stores apply SwiGLU: forward makes no other pass, and one kernel makes the gradients of gate and
    up."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return _ONE_PRODUCT.workspace(phase, ins, weights, attrs, widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = Linear.cost(self, rates, call, widths, registers)
        return part, seconds + (_passes(_ONE_PASS, rates, call, widths) if call.phase == "input_gradient" else 0.0)


class GluLinear(OpDeclaration):
    """x [.., D], gate w1 [F, D], up w2 [F, D], down w3 [E, F] -> what `merged_glu` makes of the first three, times w3ᵀ
    [.., E]; keeps gate and up as that does, and hands their gradients on; with `result_again`, also SwiGLU's result,
    made again. The input gradient alone is called: all else is that of `merged_glu` and of `linear`."""

    input_keeps = ("extra0",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        _, kept = _GLU.results(ins, weights[:2], attrs)
        return (Spec((*ins[0].shape[:-1], weights[2][0])),), kept

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        handed = _GLU.carry(ins, attrs)
        return (*handed, Spec((*ins[0].shape[:-1], attrs["features"] // 2))) if _makes_result(attrs) else handed

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        down, features = weights[2]
        after = linear_products(phase, prod(ins[0][:-1]), features, down)
        return (*after, *_GLU.products(phase, ins, weights[:2], attrs))

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """What is between the two, or its gradient."""
        return _between(ins, weights, widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = super().cost(rates, call, widths, registers)
        halves = call._replace(weights=call.weights[:2])
        seconds += _passes(PackedSwiglu(), rates, halves, widths)
        if _makes_result(call.attrs):
            seconds += _passes(PackedSwiglu(), rates, halves._replace(phase="forward"), widths)
        return part, seconds


class StoredGluLinear(GluLinear):
    """Down's product makes gradients of gate and up as it stores: it reads two and writes two, where it would have
    written that of what is between; of SwiGLU's result, if it makes it again, one more. Another tile multiplies
    meanwhile, so half of that is counted. It is an assumption: the spread of the times in `gated_backward_h200.json` is
    as large as all of it."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0 if phase == "input_gradient" else super().workspace(phase, ins, weights, attrs, widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = OpDeclaration.cost(self, rates, call, widths, registers)
        more = 4 if _makes_result(call.attrs) else 3
        return part, seconds + rates.moved(more * _between(call.ins, call.weights, widths) // 2)


def _between(ins: Sequence[Shape], weights: Sequence[Shape], widths: Widths) -> int:
    """Bytes of SwiGLU's result."""
    return prod(ins[0][:-1]) * weights[0][0] * widths["compute"]


def _makes_result(attrs: Attrs) -> bool:
    return bool(attrs.get("result_again"))


def _passes(swiglu: OpDeclaration, rates: WorkRates, call: CallShapes, widths: Widths) -> Seconds:
    """Seconds of SwiGLU's own kernels, over gate and up as they lie side by side."""
    if call.phase == "weight_gradient":
        return 0.0
    packed = (*call.ins[0][:-1], sum(w[0] for w in call.weights))
    kernels = swiglu.traffic(call.phase, [packed], (), call.attrs, widths) or ()
    return fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])


def stored(name: str) -> Serves:
    """Where the layout asks for kernels of a GPU."""
    return lambda site, layout: _STORED[name] if layout.elementwise == "triton" else None


_ONE_PRODUCT, _ONE_PASS, _GLU = OneProduct(), OnePassPackedSwiglu(), MergedGlu()
_STORED: dict[str, OpDeclaration] = {"merged_glu": StoredGlu(), "glu_linear": StoredGluLinear()}

GLU: dict[str, OpDeclaration] = {"merged_glu": _GLU, "glu_linear": GluLinear()}
