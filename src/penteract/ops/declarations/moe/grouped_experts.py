"""Declarations of experts' products by groups: all experts of a rank in one kernel, which finds on the device where the
rows of each begin."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import ExpertKernel, Layout
from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    OpDeclaration,
    Product,
    Serves,
    Shape,
    linear_products,
)
from penteract.ops.declarations.moe.experts import ExpertLinear, ExpertPair
from penteract.ops.spec import Widths
from penteract.ops.tape import Site


class GroupedExpertLinear(ExpertLinear):
    """torch's, which makes its result in a temporary and not in the register."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """A result."""
        rows, (_, out, width) = ins[0][0], weights[0]
        if not rows:
            return 0
        if phase == "weight_gradient":
            return prod(weights[0]) * widths["compute"]
        return rows * (out if phase == "forward" else width) * widths["compute"]


def _over_all_rows(call: CallShapes) -> tuple[Product, ...]:
    """Weight gradients of all experts as one product over all rows, which has the same FLOPs: while the sums of one
    expert are written, those of the next are computed. Separate products over few rows would wait for that."""
    rows = call.ins[0][0]
    return tuple(p for _, out, width in call.weights for p in linear_products(call.phase, rows, width, out))


class QuackExpertLinear(ExpertLinear):
    """quack's, which write into what they are given, in its own dtype, and add to it."""

    def timed_products(self, call: CallShapes) -> tuple[Product, ...]:
        return _over_all_rows(call) if call.phase == "weight_gradient" else super().timed_products(call)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0


class QuackExpertPair(ExpertPair):
    """Two of them, of which the second adds to what the first has written."""

    def timed_products(self, call: CallShapes) -> tuple[Product, ...]:
        return _over_all_rows(call) if call.phase == "weight_gradient" else super().timed_products(call)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0


PAIR = QuackExpertPair()
GROUPED: dict[ExpertKernel, OpDeclaration] = {"grouped": GroupedExpertLinear(), "quack": QuackExpertLinear()}


def in_pairs(site: Site, layout: Layout) -> OpDeclaration | None:
    """Where a layout asks for quack's kernels: no other edit makes pairs."""
    return PAIR if layout.experts == "quack" else None


def by_groups(name: ExpertKernel) -> Serves:
    """Where a layout asks for these kernels, of products that are not in FP8."""
    declaration = GROUPED[name]

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        return declaration if layout.experts == name and site.attrs.get("fp8") is None else None

    return serves
