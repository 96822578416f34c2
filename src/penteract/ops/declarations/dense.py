"""Declarations of the dense ops: embedding, linear, norms, rope, activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import (
    BOOL,
    Attrs,
    OpDeclaration,
    Product,
    Shape,
    Specs,
    linear_products,
    mixed,
    narrow_product,
    widened,
)
from penteract.ops.declarations.kernel_sequences import (
    added,
    angle_kernels,
    cut_copies,
    local_ids,
    root_mean_square,
    whole,
)
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Spec, Widths


class Embedding(OpDeclaration):
    """ids [s, B], table [V@axis, D] -> rows [s, B, D]; if `axis` shards the table, ids of other shards give zeros."""

    differentiable = ()
    weight_keeps = ("in0",)
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape, weights[0][1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """If the table is sharded: local row indices, and a mask of ids of other shards (two masks while it is
        made)."""
        tokens, width = prod(ins[0]), weights[0][1]
        if phase == "forward":
            return tokens * (widths["index"] + 2 * BOOL) if attrs["axis"] else 0
        if not attrs["axis"]:
            return tokens * width * widths["gradient"] if widths["gradient"] != widths["compute"] else 0
        return tokens * (widths["index"] + BOOL + width * widths["gradient"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Rows of the table. A gradient is added to the bucket; zeroing the bucket first is not counted."""
        e, tokens, width = Eager(widths), prod(ins[0]), weights[0][1]
        n, cut = tokens * width, bool(attrs["axis"])
        local = local_ids(e, tokens) if cut else ()
        rest = (e.each(n, "compute", "compute", ("mask", tokens), typed=True),) if cut else ()
        if phase == "forward":
            return (*local, e.sums(("index", tokens), ("compute", 2 * n)), *rest)
        made = (e.copy(n, "compute", "gradient"),) if cut or widths["gradient"] != widths["compute"] else ()
        rest = (e.each(n, "gradient", "gradient", ("mask", tokens), typed=True),) if cut else ()
        return (*local, *made, *rest, e.places(n, ("index", tokens), "gradient", "gradient", "gradient"))


class Linear(OpDeclaration):
    """x [.., D], w [F, D], bias [F] or none -> x·wᵀ + bias [.., F]."""

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


class AddBias(OpDeclaration):
    """x [.., D], b [D] -> x + b [.., D]; the gradient of b is the sum over rows."""

    passes_gradient = True

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return weights[0][0] * widths["gradient"] if phase == "weight_gradient" else 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        if phase == "forward":
            return (e.each(n, "compute", ("compute", width), "compute"),)
        return e.sums(("compute", n), ("gradient", width)), added(e, width, "gradient")


class RmsNorm(OpDeclaration):
    """x [.., n·C], w [C] -> each group of C over its root mean square, times w; keeps one scale per group [.., n]
    (Zhang & Sennrich 2019, 1910.07467). `largest`: the largest absolute value of the result too, [1]."""

    input_keeps = weight_keeps = ("in0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        largest = (Spec((1,), "stat"),) if attrs.get("largest") else ()
        return (ins[0],), (Spec((*rows, width // weights[0][0]), "stat"), *largest)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        n, width = prod(ins[0]), weights[0][0]
        if phase == "forward":
            return widened(n, widths)
        if phase == "input_gradient":
            return (2 * n + n // width) * widths["stat"]
        return (n + width) * widths["stat"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Of x [rows, width] and its scale [rows]."""
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        rows = n // width
        of_rows, of_width, wide = ("stat", rows), ("compute", width), mixed(widths)
        scaled = e.each(n, "compute", of_rows, "stat")
        if phase == "forward":
            weighed = e.each(n, "stat", of_width, "stat")
            narrowed = (e.copy(n, "stat", "compute"),) if wide else ()
            largest = (e.sums(("compute", n), ("stat", 1)),) if attrs.get("largest") else ()
            return (*root_mean_square(e, n, rows, "compute"), scaled, weighed, *narrowed, *largest)
        if phase == "weight_gradient":
            slopes = e.each(n, "stat", "compute", "stat")
            return scaled, slopes, e.sums(("stat", n), ("stat", width)), added(e, width, "stat")
        return (
            *((e.copy(width, "compute", "stat"),) if wide else ()), e.each(n, "compute", ("stat", width), "stat"),
            e.each(n, "stat", "compute", "stat"), e.sums(("stat", n), of_rows),
            *[e.each(rows, "stat", "stat", "stat")] * 2, e.each(n, "compute", of_rows, "stat"),
            e.each(n, "stat", "stat", "stat"), e.each(n, "stat", of_rows, "stat"), e.copy(n, "stat", "compute"),
        )  # fmt: skip


class LayerNorm(OpDeclaration):
    """x [.., D], w [D], b [D] -> the normalised row times w, plus b; keeps each row's mean and scale, both [.., 1]
    (Ba et al. 2016, 1607.06450)."""

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

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Of x [rows, width], its mean and its scale [rows]."""
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        rows = n // width
        of_rows, of_width = ("stat", rows), ("compute", width)
        centred, by_row = e.each(n, "compute", of_rows, "stat"), e.each(n, "stat", of_rows, "stat")
        if phase == "forward":
            return (
                e.sums(("compute", n), of_rows), centred, *root_mean_square(e, n, rows, "stat"), by_row,
                *[e.each(n, "stat", of_width, "stat")] * 2, e.copy(n, "stat", "compute"),
            )  # fmt: skip
        if phase == "weight_gradient":
            return (
                centred, by_row, e.each(n, "stat", "compute", "stat"), e.sums(("stat", n), ("stat", width)),
                added(e, width, "stat"), e.sums(("compute", n), ("gradient", width)), added(e, width, "gradient"),
            )  # fmt: skip
        mean, plain = e.sums(("stat", n), of_rows), e.each(n, "stat", "stat", "stat")
        return (
            *((e.copy(width, "compute", "stat"),) if mixed(widths) else ()),
            e.each(n, "compute", ("stat", width), "stat"), mean, by_row, centred, plain, mean,
            *[e.each(rows, "stat", "stat", "stat")] * 2, centred, by_row, plain, by_row, e.copy(n, "stat", "compute"),
        )  # fmt: skip


class Rope(OpDeclaration):
    """x [s, B, n·C], positions [s, B] -> same; each head is rotated by its position, except its first `plain_size`
    features (Su et al. 2021, 2104.09864)."""

    input_keeps = ("in1",)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Frequencies and angles are float64; with the angles there is a cosine, and a sine if its dtype is
        narrower."""
        half, double, stat = (attrs["head_size"] - attrs["plain_size"]) // 2, 8, widths["stat"]
        angles = prod(ins[1]) * half
        sine = stat if stat != double else 0
        rotated = prod(ins[0]) // attrs["head_size"] * half
        return max(half * double + angles * (double + stat + sine), (2 * angles + rotated) * stat)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Angles of every token, then each half of the rotated features, and the copy of the others."""
        e, tokens, size, plain = Eager(widths), prod(ins[1]), attrs["head_size"], attrs["plain_size"]
        half, rows = (size - plain) // 2, prod(ins[0]) // size
        rotated, strided, angles = rows * half, rows > 1, ("stat", tokens * half)
        still = rows * plain
        return (
            *angle_kernels(e, tokens, half, attrs["scaling"]),
            *((e.copy(still, "compute", "compute", strided=strided),) if plain else ()),
            *(
                2
                * (
                    e.each(rotated, "compute", angles, "stat", strided=strided),
                    e.each(rotated, "stat", "compute", angles, "stat", strided=strided),
                    e.copy(rotated, "stat", "compute", strided=strided),
                )
            ),
        )


class Swiglu(OpDeclaration):
    """gate [.., F], up [.., F] -> silu(gate) · up [.., F] (Shazeer 2020, 2002.05202)."""

    differentiable = (0, 1)
    input_keeps = ("in0", "in1")

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), prod(ins[0])
        one, two = e.each(n, "compute", "compute"), e.each(n, "compute", "compute", "compute")
        return (one, two) if phase == "forward" else (one, two, two, two)


class Gelu(OpDeclaration):
    """x [.., F] -> same, GELU in its tanh form (Hendrycks & Gimpel 2016, 1606.08415)."""

    input_keeps = ("in0",)


class Add(OpDeclaration):
    """a, b of one shape -> a + b; the gradient of the result is the gradient of both."""

    differentiable = (0, 1)
    passes_gradient = True


class SumShares(OpDeclaration):
    """x [n·s, B, D] of this rank, shares [n·s, B, D] that n = `shares` ranks sent -> their sum [s, B, D]: this rank's
    place of x, and all other places of the shares."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows = ins[0].shape[0]
        assert isinstance(rows, int)
        return (Spec((rows // attrs["shares"], *ins[0].shape[1:])),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), prod(ins[0]) // attrs["shares"]
        return (e.each(n, "compute", "compute", "compute"),) * (attrs["shares"] - 1)


class Split(OpDeclaration):
    """x [.., n] -> [.., first], [.., n - first]"""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        return (Spec((*rows, attrs["first"])), Spec((*rows, width - attrs["first"]))), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return (0, 1)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return tuple(cut_copies(Eager(widths), ins[0], attrs["first"])) if phase == "forward" else (whole(widths, ins),)


class Join(OpDeclaration):
    """a [.., n], b [.., m] -> [.., n + m]"""

    differentiable = (0, 1)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, first = ins[0].shape
        second = ins[1].shape[-1]
        assert isinstance(first, int) and isinstance(second, int)
        return (Spec((*rows, first + second)),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        if phase == "forward":
            return (whole(widths, ins),)
        together = (*ins[0][:-1], ins[0][-1] + ins[1][-1])
        return tuple(cut_copies(Eager(widths), together, ins[0][-1]))


class RepeatHeads(OpDeclaration):
    """x [s, B, K·C] -> [s, B, K·times·C], each head `times` times in a row; its gradient is the sum over its copies."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        return (Spec((*rows, width * attrs["times"])),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), prod(ins[0])
        if phase == "forward":
            return (e.copy(n * attrs["times"], ("compute", n), "compute"),)
        return (e.sums(("compute", n * attrs["times"]), ("compute", n)),)


class PackHeads(OpDeclaration):
    """x [s, B, n·w] -> [n·s, B, w]: the columns for each of n = `ranks`, stacked as rows. Redistributions use it in
    both directions, so it has no gradient of its own."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(s, int) and isinstance(width, int)
        return (Spec((s * attrs["ranks"], b, width // attrs["ranks"])),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).copy(prod(ins[0]), "compute", "compute", strided=True),)


class UnpackHeads(OpDeclaration):
    """x [n·s, B, w] -> [s, B, n·w]"""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(s, int) and isinstance(width, int)
        return (Spec((s // attrs["ranks"], b, width * attrs["ranks"])),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).copy(prod(ins[0]), "compute", "compute", strided=True),)


DENSE: dict[str, OpDeclaration] = {
    "embedding": Embedding(),
    "linear": Linear(),
    "add_bias": AddBias(),
    "rms_norm": RmsNorm(),
    "layer_norm": LayerNorm(),
    "rope": Rope(),
    "swiglu": Swiglu(),
    "gelu": Gelu(),
    "add": Add(),
    "sum_shares": SumShares(),
    "split": Split(),
    "join": Join(),
    "repeat_heads": RepeatHeads(),
    "pack_heads": PackHeads(),
    "unpack_heads": UnpackHeads(),
}
