"""Declaration of experts' linear layers in FP8: their forward and input gradient.

Both sum over features. So a token's scales come from its own features and a weight's from its expert only: results do
not depend on which tokens are on a rank. Weight gradients sum over those tokens, and are not in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import fsum, prod

from penteract.config.layout import Elementwise
from penteract.config.precision.fp8 import Fp8
from penteract.ops.declarations.declaration import FLOAT, Attrs, CallShapes, Registers, Shape, WorkRates
from penteract.ops.declarations.moe.experts import ExpertLinear
from penteract.ops.declarations.quantised.fp8 import FP8_BYTES, aligned, at_a_time, scaled_by, sum_is_cut
from penteract.ops.spec import Widths
from penteract.units import Bytes, Seconds


def sizes(phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int, int, int]:
    """(rows of all experts, experts, n, k) of a phase's products; x [R, D], w [X, F, D], g [R, F]."""
    experts, f, d = weights[0]
    return (prod(ins[0][:-1]), experts, *((f, d) if phase == "forward" else (d, f)))


class ScaledExpertLinear(ExpertLinear):
    """`expert_linear` in FP8. The rows of all experts are quantised at once, each expert's matrix when it is used; an
    expert without rows allocates nothing. `elementwise`: what quantises."""

    def __init__(self, fp8: Fp8, elementwise: Elementwise = "reference") -> None:
        """`fp8`: the recipe; `elementwise`: whether plain torch or GPU kernels quantise."""
        self.fp8 = fp8
        self.elementwise: Elementwise = elementwise

    def in_fp8(self, phase: str) -> bool:
        """Whether the products of a phase are in FP8."""
        return phase != "weight_gradient"

    def scales(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int]:
        """The number of scales of all rows, padded to ALIGNED, and of one expert's matrix."""
        rows, _, n, k = sizes(phase, ins, weights)
        if self.fp8.kind == "rowwise":
            return aligned(rows), n
        blocks = k // self.fp8.block
        return aligned(rows * blocks), n // self.fp8.block * blocks

    def all_reduced_max(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs
    ) -> tuple[str, int]:
        """tp ranks that shard an expert's matrix have the same rows, and a part of each if the sum is sharded. All
        experts count, also those without rows, whose number is data-dependent."""
        rows, experts, *_ = sizes(phase, ins, weights)
        if not rows or not self.in_fp8(phase) or self.fp8.kind != "rowwise" or not sum_is_cut(phase, attrs):
            return "", 0
        first, each = self.scales(phase, ins, weights)
        return "tp", first + experts * each

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Bytes:
        """Scales of everything, all rows and one expert's matrix in FP8; with them what is being scaled, or a copy of
        the scales of the expert's rows."""
        rows, experts, n, k = sizes(phase, ins, weights)
        if not rows or not self.in_fp8(phase):
            return super().workspace(phase, ins, weights, attrs, widths)
        of_rows, each = self.scales(phase, ins, weights)
        apart = self.elementwise == "triton" and self.fp8.kind == "rowwise"  # scales do not replace the largest values
        held = (of_rows + experts * each + apart * rows) * FLOAT + rows * k * FP8_BYTES
        own = -(-rows // experts) * (1 if self.fp8.kind == "rowwise" else k // self.fp8.block) * FLOAT
        first = at_a_time(self.fp8, self.elementwise, (rows, k), square=False)
        second = at_a_time(self.fp8, self.elementwise, (n, k), square=True)
        return held + max(first, n * k * FP8_BYTES + apart * n * FLOAT + max(second, own))

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], widths: Widths) -> Bytes:
        """Bytes read and written to quantise: rows, and the matrices of experts with rows."""
        rows, experts, n, k = sizes(phase, ins, weights)
        if not self.in_fp8(phase):
            return 0
        reads = 1 if self.fp8.kind == "blockwise" and self.elementwise == "triton" else 2
        return (rows + min(experts, rows) * n) * k * (reads * widths["compute"] + FP8_BYTES)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        if not self.in_fp8(call.phase):
            return super().cost(rates, call, widths, registers)
        passes = self.passes(call.phase, call.ins, call.weights, widths)
        scaled = partial(rates.scaled, by=scaled_by(self.fp8, call.phase))
        return self.part, fsum(map(scaled, self.products(*call.of_op))) + rates.moved(passes)


@cache
def scaled_experts(fp8: Fp8, elementwise: Elementwise = "reference") -> ScaledExpertLinear:
    """The declaration for a recipe."""
    return ScaledExpertLinear(fp8, elementwise)
