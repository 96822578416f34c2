"""Declarations of the dense words: embedding, linear, norms, rope, activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.bodies.body import BOOL, Attrs, Body, Product, Shape, Specs, linear_products, narrow_product, widened
from penteract.ops.spec import Spec, Widths


class Embedding(Body):
    differentiable = ()
    weight_keeps = ("in0",)
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape, weights[0][1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Where the table is cut: ids as its rows, and which are of other shards (two masks while that is found)."""
        tokens, width = prod(ins[0]), weights[0][1]
        if phase == "forward":
            return tokens * (widths["index"] + 2 * BOOL) if attrs["axis"] else 0
        if not attrs["axis"]:
            return tokens * width * widths["gradient"] if widths["gradient"] != widths["compute"] else 0
        return tokens * (widths["index"] + BOOL + width * widths["gradient"])


class Linear(Body):
    weight_keeps = ("in0",)
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape[:-1], weights[0][0])),), ()

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return linear_products(phase, prod(ins[0][:-1]), ins[0][-1], weights[0][0])

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        if phase != "weight_gradient":
            return 0
        bias = sum(prod(b) for b in weights[1:]) * widths["gradient"]
        return max(narrow_product(prod(weights[0]), widths), bias)


class AddBias(Body):
    passes_gradient = True

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return weights[0][0] * widths["gradient"] if phase == "weight_gradient" else 0


class RmsNorm(Body):
    input_keeps = weight_keeps = ("in0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        return (ins[0],), (Spec((*rows, width // weights[0][0]), "stat"),)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        n, width = prod(ins[0]), weights[0][0]
        if phase == "forward":
            return widened(n, widths)
        if phase == "input_gradient":
            return (2 * n + n // width) * widths["stat"]
        return (n + width) * widths["stat"]


class LayerNorm(Body):
    input_keeps = weight_keeps = ("in0", "extra0", "extra1")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        row = Spec((*ins[0].shape[:-1], 1), "stat")
        return (ins[0],), (row, row)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        n, width = prod(ins[0]), weights[0][0]
        elements = {"forward": n, "input_gradient": 2 * n + n // width, "weight_gradient": n + width}
        return elements[phase] * widths["stat"]


class Rope(Body):
    input_keeps = ("in1",)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Frequencies and angles are float64: beside the angles one cosine is left, and a sine where it is narrower."""
        half, double, stat = (attrs["head_size"] - attrs["plain_size"]) // 2, 8, widths["stat"]
        angles = prod(ins[1]) * half
        sine = stat if stat != double else 0
        turned = prod(ins[0]) // attrs["head_size"] * half
        return max(half * double + angles * (double + stat + sine), (2 * angles + turned) * stat)


class Swiglu(Body):
    differentiable = (0, 1)
    input_keeps = ("in0", "in1")


class Gelu(Body):
    input_keeps = ("in0",)


class Add(Body):
    differentiable = (0, 1)
    passes_gradient = True


class Split(Body):
    """x [.., n] -> [.., first], [.., n - first]"""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        return (Spec((*rows, attrs["first"])), Spec((*rows, width - attrs["first"]))), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return (0, 1)


class Join(Body):
    """a [.., n], b [.., m] -> [.., n + m]"""

    differentiable = (0, 1)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, first = ins[0].shape
        second = ins[1].shape[-1]
        assert isinstance(first, int) and isinstance(second, int)
        return (Spec((*rows, first + second)),), ()


class RepeatHeads(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        return (Spec((*rows, width * attrs["times"])),), ()


class PackHeads(Body):
    """x [s, B, n·w] -> [n·s, B, w]: `pieces` of columns, n, as rows one below the other. It is said in a seam, either
    way, so no gradient goes through it."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(s, int) and isinstance(width, int)
        return (Spec((s * attrs["pieces"], b, width // attrs["pieces"])),), ()


class UnpackHeads(Body):
    """x [n·s, B, w] -> [s, B, n·w]"""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(s, int) and isinstance(width, int)
        return (Spec((s // attrs["pieces"], b, width * attrs["pieces"])),), ()


DENSE: dict[str, Body] = {
    "embedding": Embedding(),
    "linear": Linear(),
    "add_bias": AddBias(),
    "rms_norm": RmsNorm(),
    "layer_norm": LayerNorm(),
    "rope": Rope(),
    "swiglu": Swiglu(),
    "gelu": Gelu(),
    "add": Add(),
    "split": Split(),
    "join": Join(),
    "repeat_heads": RepeatHeads(),
    "pack_heads": PackHeads(),
    "unpack_heads": UnpackHeads(),
}
