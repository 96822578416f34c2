"""Gate and up projections with SwiGLU as one op, which the fusion "glu" puts in the place of `merged_linear` and
`packed_swiglu`. Shazeer 2020 (2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    OpDeclaration,
    Registers,
    Shape,
    Specs,
    WorkRates,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.declarations.fusions import MergedLinear, OnePassPackedSwiglu, OneProduct, PackedSwiglu
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Seconds


class MergedGlu(MergedLinear):
    """x [.., D], gate w1 [F, D], up w2 [F, D] -> silu(x·w1ᵀ)·(x·w2ᵀ) [.., F]; keeps gate and up [.., 2·F], in an order
    that is the implementation's own. Their gradients, side by side, are handed on to the weight gradient."""

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
    """A product whose stores apply SwiGLU: forward makes no other pass. Gate and up alternate in what it keeps, and one
    kernel makes their gradients."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return _ONE_PRODUCT.workspace(phase, ins, weights, attrs, widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = Linear.cost(self, rates, call, widths, registers)
        return part, seconds + (_passes(_ONE_PASS, rates, call, widths) if call.phase == "input_gradient" else 0.0)


def _passes(swiglu: OpDeclaration, rates: WorkRates, call: CallShapes, widths: Widths) -> Seconds:
    """Seconds of SwiGLU's own kernels, over gate and up as they lie side by side."""
    if call.phase == "weight_gradient":
        return 0.0
    packed = (*call.ins[0][:-1], sum(w[0] for w in call.weights))
    kernels = swiglu.traffic(call.phase, [packed], (), call.attrs, widths) or ()
    return fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])


def stored(site: Site, layout: Layout) -> OpDeclaration | None:
    """Where the layout asks for kernels of a GPU."""
    return _STORED if layout.elementwise == "triton" else None


_ONE_PRODUCT, _ONE_PASS, _STORED = OneProduct(), OnePassPackedSwiglu(), StoredGlu()

GLU: dict[str, OpDeclaration] = {"merged_glu": MergedGlu()}
