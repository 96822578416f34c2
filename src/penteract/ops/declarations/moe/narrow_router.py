"""Routing on GPUs: products whose factors have 16 bits, with statistics as exact as in fp32, and one kernel each way to
choose experts.

A product of two 16-bit numbers is exact in fp32, so logits are those of fp32 but for the order of their sums. In
backward the logits' gradient has 32 bits: it becomes `PARTS` numbers of 16 bits whose sum it is, side by side, and one
product takes them all. Of bfloat16, which has the exponents of fp32, the parts lose nothing; of float16, what is below
its smallest number, as all its gradients do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, prod

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import (
    FLOAT,
    Attrs,
    CallShapes,
    OpDeclaration,
    Product,
    Registers,
    Shape,
    WorkRates,
)
from penteract.ops.declarations.moe.experts import Router
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

PARTS = 3  # numbers of 8 bits that hold the 24 of an fp32 number


class NarrowRouter(Router):
    """Products of 16-bit factors where activations have 16 bits; the choice in one kernel where statistics have 32."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Backward: the parts, and a weight for each of them, or the weight's gradient by each of them."""
        if widths["stat"] != FLOAT or (phase == "weight_gradient" and not _narrow(widths)):
            return super().workspace(phase, ins, weights, attrs, widths)
        if phase == "forward" or not _narrow(widths):
            return 0
        elements = PARTS * prod(weights[0])
        parts = PARTS * prod(ins[0][:-1]) * weights[0][0] * widths["compute"]
        return parts + elements * widths["stat" if phase == "weight_gradient" else "compute"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels | None:
        """Beside the products. Backward: the gradient of the logits; of 16-bit factors with its parts, and a weight for
        each of them; parts again, and the sum of the weight's gradients by each of them. None: as plain torch."""
        if widths["stat"] != FLOAT:
            return None
        e, tokens, (experts, width) = Eager(widths), prod(ins[0][:-1]), weights[0]
        scores, copies, table = tokens * experts, tokens * attrs["top_k"], experts * width
        parts = PARTS * scores if _narrow(widths) else 0
        if phase == "forward":
            choices = ins[0][1] * experts
            counted = ("index", copies + 2 * choices)
            return e.each(choices, "index"), e.sums(("stat", 2 * scores), ("compute", copies), counted)
        if phase == "input_gradient":
            read = 3 if attrs["balance"] == "loss" else 2
            slopes = e.sums(("stat", read * scores), ("compute", copies + parts), ("index", copies))
            return (slopes, e.sums(("compute", (PARTS + 1) * table))) if parts else (slopes,)
        if not parts:
            return None
        added = e.each(table, "stat", "stat", "stat")
        split = e.sums(("stat", scores), ("compute", parts))
        return split, *[added] * (PARTS - 1), e.each(table, "stat", "gradient", "gradient")

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        if (kernels := self.traffic(*call.of_op, widths)) is None:
            return super().cost(rates, call, widths, registers)
        (one,) = self.products(*call.of_op)
        product = _of_parts(call.phase, one) if _narrow(widths) and call.phase != "forward" else one
        return self.part, rates.product(product) + fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])


def _narrow(widths: Widths) -> bool:
    return widths["compute"] == 2


def _of_parts(phase: str, one: Product) -> Product:
    """The product of the logits' gradient with all of its parts: they are summed, or rows of the result."""
    return one._replace(k=PARTS * one.k) if phase == "input_gradient" else one._replace(m=PARTS * one.m)


def narrow_router(site: Site, layout: Layout) -> OpDeclaration | None:
    """Where a layout asks for GPU kernels."""
    return NARROW_ROUTER["router"] if layout.elementwise == "triton" else None


NARROW_ROUTER: dict[str, OpDeclaration] = {"router": NarrowRouter()}
