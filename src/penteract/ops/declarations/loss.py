"""Declarations of the loss: vocabulary-parallel cross entropy in three steps, for all tokens or some at a time, with
z-loss (PaLM, Chowdhery 2022, 2204.02311 §5: z times the square of each row's log-sum-exp); and loss terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from penteract.ops.declarations.declaration import (
    BOOL,
    FLOAT,
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

REPORT = 8  # bytes: what a program says of its part of a row of logits


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


_ROW_MAX, _EXP_SUM, _LIKELIHOOD, _GRADIENT = RowMax(), ExpSum(), NegativeLogLikelihood(), LogitsGradient()


class LossAndGradient(OpDeclaration):
    """Whole rows of logits [s, B, V], targets [s, B], g [] -> Σ over targets of the negative log-likelihood []; with z,
    z·Σ of the squared log-sum-exp []. The gradient, as `logits_gradient` has it, is left where the logits were."""

    differentiable = ()
    overwrites = (0,)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        scalar = Spec((), "stat")
        return ((scalar, scalar) if attrs.get("z") else (scalar,)), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Its steps' own, in addition to what one hands to the next: maxima, sums, log-sum-exps."""
        logits, targets, g = ins
        row, stat = prod(targets), widths["stat"]
        largest = _ROW_MAX.workspace(phase, [logits], (), attrs, widths)
        sums = _EXP_SUM.workspace(phase, [logits, targets, targets], (), attrs, widths)
        likelihood = _LIKELIHOOD.workspace(phase, [(2, *targets), targets, targets], (), attrs, widths)
        gradient = _GRADIENT.workspace(phase, [logits, targets, targets, g], (), attrs, widths)
        steps = (row + largest // stat, 3 * row + sums // stat, 4 * row + likelihood // stat)
        return max(*(n * stat for n in steps), row * stat + gradient)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        logits, targets, g = ins
        found = (
            _ROW_MAX.traffic(phase, [logits], (), attrs, widths),
            _EXP_SUM.traffic(phase, [logits, targets, targets], (), attrs, widths),
            _LIKELIHOOD.traffic(phase, [(2, *targets), targets, targets], (), attrs, widths),
            _GRADIENT.traffic(phase, [logits, targets, targets, g], (), attrs, widths),
        )
        return tuple(k for kernels in found for k in kernels or ())


class OnePassLoss(LossAndGradient):
    """By a kernel that reads each row for its sums, and again, from the cache, for its gradient."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Each row's part of the sums."""
        return (2 if attrs.get("z") else 1) * prod(ins[1]) * FLOAT

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, rows = Eager(widths), prod(ins[0]), prod(ins[1])
        return e.sums(("compute", 2 * n), ("index", rows), ("stat", rows)), e.sums(("stat", rows))


class SharedRowsLoss(OnePassLoss):
    """By a kernel that reads each row once: its programs have a part of a row each, and tell each other of it."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """A ticket and each part's report too."""
        return super().workspace(phase, ins, weights, attrs, widths) + (1 + _reports(ins)) * REPORT

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Reports are written twice and read once."""
        e, (logits, targets, _), reports = Eager(widths), ins, _reports(ins) * REPORT // widths["index"]
        rows = prod(targets)
        shared = e.sums(("compute", 2 * prod(logits)), ("index", rows + 2 * reports), ("stat", rows))
        return e.sums(("index", reports)), shared, e.sums(("stat", rows))


def row_part(columns: int) -> int:
    """Columns of a row of logits that one program has in registers, 64 of a thread: the fastest of several at 128,256
    and at 151,936 columns on an H200 (`benchmarks/loss_forms.py`)."""
    return 8192 if columns <= 2**17 else 4096


def _reports(ins: Sequence[Shape]) -> int:
    """Parts of all rows of logits."""
    return prod(ins[1]) * -(-ins[0][-1] // row_part(ins[0][-1]))


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
