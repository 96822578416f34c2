"""Declarations of what keeps experts evenly busy: a loss over their loads, or the counts that move a bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import Attrs, OpDeclaration, Shape, Specs
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Spec, Widths


class BalanceLoss(OpDeclaration):
    """scores [s, B, X], choices [B, X] of the whole sequence -> this rank's share of Σ over sequences of f·P, []."""

    input_keeps = ("in0", "in1")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "stat"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Sigmoids are first normalised, which needs their sum for each token."""
        scores, tokens, loads = prod(ins[0]), prod(ins[0][:-1]), prod(ins[1])
        sigmoid = attrs["score"] == "sigmoid"
        if phase == "forward":
            return (scores + max(tokens, loads) if sigmoid else 2 * loads) * widths["stat"]
        return (loads + (2 * tokens if sigmoid else 0)) * widths["stat"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Of scores [tokens, experts] and loads [sequences, experts]."""
        e, n, tokens, loads = Eager(widths), prod(ins[0]), prod(ins[0][:-1]), prod(ins[1])
        of_tokens, of_loads = ("stat", tokens), ("stat", loads)
        load = e.copy(loads, "index", "stat"), e.each(loads, "stat", "stat")
        row, by_row = e.sums(("stat", n), of_tokens), e.each(n, "stat", of_tokens, "stat")
        sigmoid = attrs["score"] == "sigmoid"
        if phase == "forward":
            shares = (row, by_row) if sigmoid else ()
            weighed = e.each(loads, "stat", "stat", "stat")
            return *shares, e.sums(("stat", n), of_loads), *load, weighed, e.sums(of_loads, ("stat", 1))
        slopes = *load, e.each(loads, "stat", ("stat", 1), "stat")
        if not sigmoid:
            return *slopes, e.copy(n, of_loads, "stat")
        mean = e.each(tokens, "stat", "stat", "stat")
        less = e.each(n, of_loads, of_tokens, "stat")
        return *slopes, row, e.each(n, of_loads, "stat", "stat"), row, mean, less, by_row


class TokensPerExpert(OpDeclaration):
    """choices [B, X] are added to the step's counts, which update the balance bias."""

    differentiable = ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return ins[0][-1] * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), ins[0][-1]
        return e.sums(("index", prod(ins[0])), ("index", n)), e.each(n, "index", "index", "index")


BALANCE: dict[str, OpDeclaration] = {"balance_loss": BalanceLoss(), "tokens_per_expert": TokensPerExpert()}
