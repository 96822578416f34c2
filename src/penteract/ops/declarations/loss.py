"""Declarations of the loss: vocabulary-parallel cross entropy in three steps, for all tokens or some at a time, with
z-loss (PaLM, Chowdhery 2022, 2204.02311 §5: z times the square of each row's log-sum-exp); and loss terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from penteract.ops.declarations.declaration import (
    BOOL,
    Attrs,
    OpDeclaration,
    Product,
    Shape,
    Specs,
    linear_products,
    narrow_product,
    product_flops,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.declarations.kernel_sequences import local_targets
from penteract.ops.declarations.traffic import Eager, Kernel, Kernels
from penteract.ops.spec import Spec, Widths


def at_once(logits: Shape, attrs: Attrs) -> int:
    """How many tokens' logits are converted to stat at a time: as `attrs` says, or all."""
    tokens = prod(logits[:-1])
    return min(tokens, attrs.get("at_once", tokens))


def repeated(kernels: Kernels, times: float) -> Iterator[Kernel]:
    """The kernels for some tokens, repeated for all. The last group may be smaller, so `times` may be fractional."""
    return (kernel._replace(times=times) for kernel in kernels)


class RowMax(OpDeclaration):
    """logits [s, B, V@axis] -> the maximum over each row's local columns, [s, B] in stat."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec(ins[0].shape[:-1], "stat"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[0][:-1]) * widths["compute"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, rows = Eager(widths), prod(ins[0][:-1])
        return e.sums(("compute", prod(ins[0])), ("compute", rows)), e.copy(rows, "compute", "stat")


class ExpSum(OpDeclaration):
    """logits [s, B, V@axis], maximum, targets [s, B] -> [2, s, B]: Σ exp(logit - max), and the target's logit - max."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((2, *ins[1].shape), "stat"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The shifted logits; each target's column, and whether it is local."""
        return at_once(ins[0], attrs) * ins[0][-1] * widths["stat"] + prod(ins[2]) * (widths["index"] + BOOL)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, tokens, rows, columns = Eager(widths), prod(ins[2]), at_once(ins[0], attrs), ins[0][-1]
        n, of_rows = rows * columns, ("stat", rows)
        some = (
            e.each(n, "compute", of_rows, "stat"), e.places(rows, "index", "stat", "stat"),
            e.each(n, "stat", "stat"), e.sums(("stat", n), of_rows),
        )  # fmt: skip
        return *local_targets(e, tokens), *repeated(some, tokens / rows), e.each(tokens, "stat", "mask", "stat")


class NegativeLogLikelihood(OpDeclaration):
    """sums [2, s, B], max, targets -> Σ over targets [], log-sum-exp [s, B]; with z, z·Σ over targets of its square."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        scalar = Spec((), "stat")
        return (scalar, Spec(ins[1].shape, "stat"), *([scalar] if attrs.get("z") else [])), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[2]) * (widths["stat"] + BOOL)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), prod(ins[2])
        one, two, counted = (
            e.each(n, "stat", "stat"),
            e.each(n, "stat", "stat", "stat"),
            e.each(n, "stat", "mask", "stat"),
        )
        total = e.sums(("stat", n), ("stat", 1))
        squares = (one, counted, total, e.each(1, "stat", "stat")) if attrs.get("z") else ()
        return one, e.each(n, "index", "mask", typed=True), two, two, counted, total, *squares


class CrossEntropyGradient(OpDeclaration):
    """logits, log-sum-exp, targets, g [] -> (softmax·(1 + 2·z·log-sum-exp) - onehot)·g, zero where the target is
    ignored. z-loss and cross entropy have the same scale, so g is the gradient of both."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The probabilities; each target's column, and whether it is local; each row's g, and whether it counts."""
        rows = at_once(ins[0], attrs)
        local = prod(ins[2]) * (widths["index"] + BOOL)
        return rows * ins[0][-1] * widths["stat"] + local + rows * (widths["stat"] + BOOL)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, tokens, rows, columns = Eager(widths), prod(ins[2]), at_once(ins[0], attrs), ins[0][-1]
        n, of_rows, of_row = rows * columns, ("stat", rows), e.each(rows, "stat", "stat")
        by_row = e.each(n, "stat", of_rows, "stat")
        some = (
            e.each(n, "compute", of_rows, "stat"), e.each(n, "stat", "stat"),
            *((of_row, of_row, by_row) if attrs.get("z") else ()),
            e.each(rows, "mask", "stat"), of_row, e.places(rows, "index", "stat", "stat", "stat"),
            e.each(rows, "index", "mask", typed=True), e.each(rows, ("stat", 1), "mask", "stat"),
            by_row, e.copy(n, "stat", "compute"),
        )  # fmt: skip
        return *local_targets(e, tokens), *repeated(some, tokens / rows)


class LogitsGradient(CrossEntropyGradient):
    """The same, written over the logits."""

    overwrites = (0,)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()


class Logits(Linear):
    """A linear layer whose weight gradient is computed for `columns` of its results at a time, to bound its
    workspace."""

    deferrable = False

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        rows, width, out = prod(ins[0][:-1]), ins[0][-1], weights[0][0]
        if phase != "weight_gradient":
            return linear_products(phase, rows, width, out)
        columns = attrs["columns"]
        whole = int(out // columns)
        rest = out - whole * columns
        parts = [columns] * whole + [rest] * bool(rest)
        return tuple(p for n in parts for p in linear_products(phase, rows, width, n))

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        """Those of the whole product: its parts, of which a large vocabulary has a thousand, have the same together."""
        return product_flops(linear_products(phase, prod(ins[0][:-1]), ins[0][-1], weights[0][0]))

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        out, width = weights[0]
        return narrow_product(min(out, attrs["columns"]) * width, widths) if phase == "weight_gradient" else 0


class Rows(OpDeclaration):
    """x [s, ..] -> its rows from `begin` on, `count` of them."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((attrs["count"], *ins[0].shape[1:]), ins[0].role),), ()


class JoinRows(OpDeclaration):
    """Parts of the rows -> all rows, concatenated along dim 0."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        count = sum(d for spec in ins if isinstance(d := spec.shape[0], int))
        return (Spec((count, *ins[0].shape[1:]), ins[0].role),), ()


class Loss(OpDeclaration):
    """x [], a sum over tokens or sequences, is added to a term of the loss, times that term's scale; no results."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e = Eager(widths)
        return (e.each(1, *["stat"] * (4 if phase == "forward" else 2)),)


LOSS: dict[str, OpDeclaration] = {
    "row_max": RowMax(),
    "exp_sum": ExpSum(),
    "negative_log_likelihood": NegativeLogLikelihood(),
    "cross_entropy_gradient": CrossEntropyGradient(),
    "rows": Rows(),
    "join_rows": JoinRows(),
    "logits": Logits(),
    "logits_gradient": LogitsGradient(),
    "loss": Loss(),
}
