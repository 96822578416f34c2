"""Declarations of linear layers in FP8 whose operands are cast once: what the fusion "fp8" makes of `linear`.

`quantise` casts x [T, D] both ways round in one pass, for all layers that read it: x8 [T, D] for the product, and x8ᵀ
[D, T], which the weight gradient keeps in place of x. `fp8_linear` casts its weights in forward and again, transposed,
in the input gradient, so no copy of them is kept; the gradient is cast both ways round, once, and handed on in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import fsum, prod

from penteract.config.layout import Elementwise, Layout
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.sampled_rows import is_long, samples_gradients
from penteract.ops.declarations.declaration import (
    FLOAT,
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
from penteract.ops.declarations.fusions import one_pass_rotation, rotation_cost, rotation_workspace
from penteract.ops.declarations.quantised.fp8 import FP8_BYTES, at_a_time
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Bytes, Seconds

ROOM = 2**23  # elements of a weight gradient that are made at a time in a temporary: few enough for a GPU's cache
_TILE_ROWS = 128  # rows of a product's tile
POSITIONS = 4  # the place of positions among the ins of `fp8_linear`, where heads are rotated


def is_cast_once(fp8: Fp8 | None) -> bool:
    """Whether the fusion takes linear layers of a recipe: one scale of this micro-batch for each tensor, and weights
    that are cast where they are used."""
    return fp8 is not None and fp8.kind == "tensorwise" and not fp8.gather


def largest_by_update(layout: Layout) -> bool:
    """Whether the update finds the largest absolute value of each weight that is cast once, for the next step: a kernel
    has them in registers. It has to see all of a weight, or ranks would have to agree on what each of them saw."""
    return layout.elementwise == "triton" and layout.updates_whole


def rows_of_room(rows: int, width: int) -> int:
    """Rows of a weight gradient [rows, width] that are made at a time in a temporary."""
    return min(rows, max(ROOM // width // _TILE_ROWS, 1) * _TILE_ROWS)


def scaling(fp8: Fp8, elementwise: Elementwise, shape: tuple[int, int]) -> Bytes:
    """Bytes to cast a tensor [rows, k] in plain torch: what is scaled at a time, and the inverse of its scale."""
    return 0 if elementwise == "triton" else FLOAT + at_a_time(fp8, elementwise, shape, square=False)


class Quantise(OpDeclaration):
    """x [.., D] -> rowwise data [.., D], columnwise data [D, T], and their scale [1]. The ranks of one
    micro-batch agree on the largest value. Second in, where what made x has found it: the largest of this rank [1]."""

    differentiable = ()
    elementwise: Elementwise = "reference"

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        columnwise = Spec((width, prod(rows)), "fp8")  # type: ignore[type-var] - no routed rows
        return (Spec(ins[0].shape, "fp8"), columnwise, Spec((1,), "stat")), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def all_reduced_max(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs
    ) -> tuple[str, int]:
        return "sequence", 1

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Bytes:
        """What is scaled at a time."""
        width = ins[0][-1]
        return scaling(attrs["fp8"], self.elementwise, (prod(ins[0]) // width, width))

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """x is read for its largest value, unless it is known, and for its data."""
        reads = 1 if len(call.ins) > 1 else 2
        return "pointwise", rates.moved(prod(call.ins[0]) * (reads * widths["compute"] + 2 * FP8_BYTES))


class OnePassQuantise(Quantise):
    """By two kernels: one finds the largest value, one writes both. Where it is known, the second reads it as it is."""

    elementwise: Elementwise = "triton"


class Fp8Linear(Linear):
    """x [.., D], its rowwise data, columnwise data and scale; w1 [F1, D], w2 [F2, D], … -> [.., F1 + F2 + …], and the
    scale of the weights, which is one for all of them. x itself is not read: its gradient is made here.

    With positions [s, B] as last in, the first `rotary_columns` are heads that are rotated by them, as in
    `merged_linear`. `features`: all columns. `known_gradient`: the largest absolute value of the gradient comes with
    it, [1]. `known_weights`: that of the weights is kept from the last update.
    """

    weight_keeps = ("in2", "in3")
    input_keeps = ("extra0",)
    elementwise: Elementwise = "reference"

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape[:-1], attrs["features"])),), (Spec((1,), "stat"),)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        """The gradient as columnwise data [F, T], and their scale."""
        tokens = prod(ins[0].shape[:-1])  # type: ignore[type-var] - no routed rows
        return Spec((attrs["features"], tokens), "fp8"), Spec((1,), "stat")

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return linear_products(phase, prod(ins[0][:-1]), ins[0][-1], attrs["features"])

    def all_reduced_max(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs
    ) -> tuple[str, int]:
        """Of the weights, then of the gradient."""
        return ("", 0) if phase == "weight_gradient" else ("sequence", 1)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Bytes:
        """FP8 data of the weights, and of the gradient for the product that reads it first. A weight gradient is added
        to its bucket some rows at a time: there is room for them in any micro-batch, so that all need the same."""
        fp8, (tokens, width) = attrs["fp8"], (prod(ins[0][:-1]), ins[0][-1])
        features = attrs["features"]
        if phase == "weight_gradient":
            return rows_of_room(features, width) * width * widths["gradient"]
        data = features * width * FP8_BYTES
        scaled = max(scaling(fp8, self.elementwise, (w[0], width)) for w in weights)
        if phase == "forward":
            return max(data + scaled, self._turning(ins, attrs, widths))
        gradient = tokens * features * FP8_BYTES
        first = scaling(fp8, self.elementwise, (tokens, features))
        return gradient + max(first, data + scaled)

    def _turning(self, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Bytes:
        return rotation_workspace([ins[0], ins[POSITIONS]], attrs, widths) if len(ins) > POSITIONS else 0

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths) -> Bytes:
        """Bytes read and written for casts: values for their largest, unless it is known, and for their data; data."""
        of_weights, tokens = sum(map(prod, weights)), prod(ins[0][:-1])
        if phase == "weight_gradient":
            return 0
        read = widths["compute"]
        if phase == "forward":
            return of_weights * ((1 if attrs.get("known_weights") else 2) * read + FP8_BYTES)
        of_gradient = of_weights // ins[0][-1] * tokens
        reads = 1 if attrs.get("known_gradient") else 2
        return of_gradient * (reads * read + 2 * FP8_BYTES) + of_weights * (read + FP8_BYTES)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        passes = self.passes(*call.of_op, widths)
        if call.phase == "weight_gradient":
            passes += call.in_bucket(widths)
        seconds = fsum(map(rates.scaled, self.products(*call.of_op))) + rates.moved(passes)
        if call.phase == "forward" and len(call.ins) > POSITIONS:
            seconds += self._turned(rates, [call.ins[0], call.ins[POSITIONS]], call.attrs, widths)
        return self.part, seconds

    def _turned(self, rates: WorkRates, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Seconds:
        return rotation_cost(rates, ins, attrs, widths)


class OnePassFp8Linear(Fp8Linear):
    """By kernels that read a tensor once for its data both ways round; no temporary holds scaled values."""

    elementwise: Elementwise = "triton"

    def _turning(self, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Bytes:
        return 0

    def _turned(self, rates: WorkRates, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Seconds:
        return one_pass_rotation(rates, ins, attrs, widths)


class Fp8Glu(Fp8Linear):
    """Gate and up projections as one `fp8_linear`, and SwiGLU of them: x, rowwise data, columnwise data, scale; w1
    [F, D], w2 [F, D] -> [.., F], and its largest absolute value [1]; also the scale of the weights, and gate and up
    [.., 2·F], which backward keeps. Their gradients are made in FP8."""

    input_keeps = ("extra0", "extra1")
    samples = False  # the scale of their gradients comes from some rows, if there are enough

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows, features, one = ins[0].shape[:-1], attrs["features"], Spec((1,), "stat")
        return (Spec((*rows, features // 2)), one), (one, Spec((*rows, features)))

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Bytes:
        """In plain torch the gradients of gate and up are made before their data."""
        found = super().workspace(phase, ins, weights, attrs, widths)
        if phase != "input_gradient" or self.elementwise == "triton":
            return found
        fp8, tokens, features = attrs["fp8"], prod(ins[0][:-1]), attrs["features"]
        made = tokens * features * widths["compute"]
        return max(found, tokens * features * FP8_BYTES + made + scaling(fp8, "reference", (tokens, features)))

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths) -> Bytes:
        """SwiGLU reads gate and up and writes; backward reads both and the gradient, for the largest of what they make
        and for its data."""
        of_weights, wide = sum(map(prod, weights)), widths["compute"]
        elements = of_weights // ins[0][-1] * prod(ins[0][:-1])  # of gate and up
        if phase == "forward":
            return super().passes(phase, ins, weights, attrs, widths) + elements * wide * 3 // 2
        if phase == "weight_gradient":
            return super().passes(phase, ins, weights, attrs, widths)
        once = self.samples and is_long(prod(ins[0][:-1]))
        read = elements * wide * 3 // 2 * (1 if once else 2)
        return read + elements * 2 * FP8_BYTES + of_weights * (wide + FP8_BYTES)


class OnePassFp8Glu(Fp8Glu):
    """By kernels: SwiGLU finds the largest value on its way; backward goes over gate, up and the gradient, twice unless
    it samples them, and makes their gradients in registers."""

    elementwise: Elementwise = "triton"


class SampledFp8Glu(OnePassFp8Glu):
    """One pass over gate, up and the gradient."""

    samples = True


FP8_LINEAR: dict[str, OpDeclaration] = {"quantise": Quantise(), "fp8_linear": Fp8Linear(), "fp8_glu": Fp8Glu()}

_ONE_PASS: dict[str, OpDeclaration] = {
    "quantise": OnePassQuantise(),
    "fp8_linear": OnePassFp8Linear(),
    "fp8_glu": OnePassFp8Glu(),
}
_SAMPLED = _ONE_PASS | {"fp8_glu": SampledFp8Glu()}


@cache
def with_kernels(op_name: str, elementwise: Elementwise) -> Serves:
    """Serves these ops in layouts with this `elementwise`."""

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        if layout.elementwise != elementwise:
            return None
        if elementwise == "reference":
            return FP8_LINEAR[op_name]
        return (_SAMPLED if samples_gradients(site.attrs["fp8"], layout) else _ONE_PASS)[op_name]

    return serves
