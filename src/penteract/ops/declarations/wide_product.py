"""Weight gradients that a product of 16-bit factors sums straight into an fp32 bucket: there is no temporary."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    OpDeclaration,
    Registers,
    Serves,
    Shape,
    WorkRates,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.declarations.loss import Logits
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Seconds


def is_wide(widths: Widths) -> bool:
    """Whether factors have 16 bits and the bucket 32: what such a product takes."""
    return widths["compute"] == 2 and widths["gradient"] == 4


class WideLinear(Linear):
    """Only its bias gradient is made in a temporary."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        if phase == "weight_gradient" and is_wide(widths):
            return sum(prod(b) for b in weights[1:]) * widths["gradient"]
        return super().workspace(phase, ins, weights, attrs, widths)


class WideLogits(Logits):
    """All columns of the vocabulary in one product."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0 if is_wide(widths) else super().workspace(phase, ins, weights, attrs, widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        return (_LINEAR.cost if is_wide(widths) else super().cost)(rates, call, widths, registers)


_LINEAR = WideLinear()


def without_recipe(declaration: OpDeclaration) -> Serves:
    """Where a layout asks for GPU kernels, of products that are not in FP8."""

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        return declaration if layout.elementwise == "triton" and site.attrs.get("fp8") is None else None

    return serves


WIDE_PRODUCT: dict[str, OpDeclaration] = {"linear": _LINEAR, "logits": WideLogits()}
