"""Declarations of the loss: vocabulary-parallel cross entropy in three steps, of all tokens or of some at a time, with
z-loss (PaLM, Chowdhery 2022, 2204.02311 §5: z times the square of each row's log-sum-exp); and loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.bodies.body import BOOL, Attrs, Body, Product, Shape, Specs, linear_products, narrow_product
from penteract.ops.bodies.dense import Linear
from penteract.ops.spec import Spec, Widths


def at_once(logits: Shape, attrs: Attrs) -> int:
    """The tokens whose logits are widened at a time: `attrs` says how many, or all."""
    tokens = prod(logits[:-1])
    return min(tokens, attrs.get("at_once", tokens))


class RowMax(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec(ins[0].shape[:-1], "stat"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[0][:-1]) * widths["compute"]


class ExpSum(Body):
    """logits [s, B, V@axis], maximum, targets [s, B] -> [2, s, B]: Σ exp(logit - max), and the target's logit - max."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((2, *ins[1].shape), "stat"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The shifted logits, and each target's column and whether it is here."""
        return at_once(ins[0], attrs) * ins[0][-1] * widths["stat"] + prod(ins[2]) * (widths["index"] + BOOL)


class NegativeLogLikelihood(Body):
    """sums [2, s, B], max, targets -> Σ over targets [], log-sum-exp [s, B]; with z, z·Σ over targets of its square."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        scalar = Spec((), "stat")
        return (scalar, Spec(ins[1].shape, "stat"), *([scalar] if attrs.get("z") else [])), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[2]) * (widths["stat"] + BOOL)


class CrossEntropyGradient(Body):
    """logits, log-sum-exp, targets, g [] -> (softmax·(1 + 2·z·log-sum-exp) - onehot)·g, zero where the target is
    ignored: z-loss has the scale of its cross entropy, so one g is that of both."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The probabilities; each target's column and whether it is here; each row's g and whether it counts."""
        rows = at_once(ins[0], attrs)
        local = prod(ins[2]) * (widths["index"] + BOOL)
        return rows * ins[0][-1] * widths["stat"] + local + rows * (widths["stat"] + BOOL)


class LogitsGradient(CrossEntropyGradient):
    """The same, left where the logits were."""

    overwrites = (0,)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()


class Logits(Linear):
    """A linear whose weight gradient is made `columns` of its results at a time: what it takes beside the bucket."""

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

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        out, width = weights[0]
        return narrow_product(min(out, attrs["columns"]) * width, widths) if phase == "weight_gradient" else 0


class Rows(Body):
    """x [s, ..] -> its rows from `begin` on, `count` of them."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((attrs["count"], *ins[0].shape[1:]), ins[0].role),), ()


class JoinRows(Body):
    """Some rows each -> all of them."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        count = sum(d for spec in ins if isinstance(d := spec.shape[0], int))
        return (Spec((count, *ins[0].shape[1:]), ins[0].role),), ()


class Loss(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()


LOSS: dict[str, Body] = {
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
