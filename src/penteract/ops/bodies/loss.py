"""Declarations of the loss: vocabulary-parallel cross entropy in three steps, and loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.bodies.body import BOOL, Attrs, Body, Shape, Specs
from penteract.ops.spec import Spec, Widths


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
        return prod(ins[0]) * widths["stat"] + prod(ins[2]) * (widths["index"] + BOOL)


class NegativeLogLikelihood(Body):
    """sums [2, s, B], max, targets -> Σ over targets [], log-sum-exp [s, B]."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "stat"), Spec(ins[1].shape, "stat")), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[2]) * (widths["stat"] + BOOL)


class CrossEntropyGradient(Body):
    """logits, log-sum-exp, targets, g [] -> (softmax - onehot)·g, zero where the target is ignored."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The probabilities; each target's column and whether it is here; each row's g and whether it counts."""
        return prod(ins[0]) * widths["stat"] + prod(ins[2]) * (widths["index"] + widths["stat"] + 2 * BOOL)


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
    "loss": Loss(),
}
