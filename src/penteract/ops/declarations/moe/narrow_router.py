"""Routing whose products have 16-bit factors, with statistics as exact as in fp32.

A product of two 16-bit numbers is exact in fp32, so logits are those of fp32 but for the order of their sums. In
backward the logits' gradient has 32 bits: it becomes `PARTS` numbers of 16 bits whose sum it is, side by side, and one
product takes them all. Of bfloat16, which has the exponents of fp32, the parts lose nothing; of float16, what is below
its smallest number, as all its gradients do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    OpDeclaration,
    Product,
    Registers,
    Shape,
    WorkRates,
)
from penteract.ops.declarations.moe.experts import Router, routing_workspace
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

PARTS = 3  # numbers of 8 bits that hold the 24 of an fp32 number


class NarrowRouter(Router):
    """By products of 16-bit factors where activations have 16 bits."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Backward: the parts, and a weight for each of them, or the weight's gradient by each of them."""
        if not _narrow(widths):
            return super().workspace(phase, ins, weights, attrs, widths)
        elements = PARTS * prod(weights[0])
        parts = PARTS * prod(ins[0][:-1]) * weights[0][0] * widths["compute"]
        if phase == "weight_gradient":
            return parts + elements * widths["stat"]
        routing = routing_workspace(phase, ins, weights, attrs, widths)
        return routing if phase == "forward" else max(routing, parts + elements * widths["compute"])

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = super().cost(rates, call, widths, registers)
        if call.phase == "forward" or not _narrow(widths):
            return part, seconds
        (one,) = self.products(*call)
        return part, seconds - rates.product(one) + rates.product(_of_parts(call.phase, one))


def _narrow(widths: Widths) -> bool:
    return widths["compute"] == 2


def _of_parts(phase: str, one: Product) -> Product:
    """The product of the logits' gradient with all of its parts: they are summed, or rows of the result."""
    return one._replace(k=PARTS * one.k) if phase == "input_gradient" else one._replace(m=PARTS * one.m)


def narrow_router(site: Site, layout: Layout) -> OpDeclaration | None:
    """Where a layout asks for GPU kernels."""
    return NARROW_ROUTER["router"] if layout.elementwise == "triton" else None


NARROW_ROUTER: dict[str, OpDeclaration] = {"router": NarrowRouter()}
