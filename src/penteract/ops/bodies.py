"""What each word's body declares: results, what it keeps for which gradient, FLOPs, workspace. No torch.

FLOPs are those of matrix products (2·m·n·k); everything else is bytes moved. Shapes reach `flops` and `workspace`
as plain numbers, with the sizes that routing decides already filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from penteract.ops.spec import Spec, Widths

Specs = tuple[Spec, ...]
Shape = tuple[int, ...]
Attrs = Mapping[str, Any]


class Body:
    """The declaration of one word. Names of what is kept: in0, in1, … out0, … extra0, …"""

    differentiable: tuple[int, ...] = (0,)  # ins that get a gradient
    input_keeps: tuple[str, ...] = ()
    weight_keeps: tuple[str, ...] = ()
    deferrable = False  # may the weight gradient run at any later time
    passes_gradient = False  # the input gradient of every differentiable in *is* the gradient of out0

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        """-> results, extras"""
        return (ins[0],), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        """The outs whose gradients the input gradient reads."""
        return (0,)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        """What the input gradient hands to the weight gradient; nothing: the gradients themselves."""
        return ()

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        return 0

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Bytes that the reference body allocates at its worst moment beside its results, freed on return."""
        return 0


class Embedding(Body):
    differentiable = ()
    weight_keeps = ("in0",)
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape, weights[0][1])),), ()


class Linear(Body):
    weight_keeps = ("in0",)
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape[:-1], weights[0][0])),), ()

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        return 2 * prod(ins[0]) * weights[0][0]


class ExpertLinear(Body):
    """One matrix an expert: w [X, F, D]; `in1` is the host's row counts."""

    input_keeps = ("in1",)
    weight_keeps = ("in0", "in1")
    deferrable = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((ins[0].shape[0], weights[0][1])),), ()

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        return 2 * prod(ins[0]) * weights[0][1]


class AddBias(Body):
    passes_gradient = True


class RmsNorm(Body):
    input_keeps = weight_keeps = ("in0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        return (ins[0],), (Spec((*rows, width // weights[0][0]), "stat"),)


class LayerNorm(Body):
    input_keeps = weight_keeps = ("in0", "extra0", "extra1")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        row = Spec((*ins[0].shape[:-1], 1), "stat")
        return (ins[0],), (row, row)


class Rope(Body):
    input_keeps = ("in1",)


class Swiglu(Body):
    differentiable = (0, 1)
    input_keeps = ("in0", "in1")


class Gelu(Body):
    input_keeps = ("in0",)


class Add(Body):
    differentiable = (0, 1)
    passes_gradient = True


class RepeatHeads(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        return (Spec((*rows, width * attrs["times"])),), ()


class Attention(Body):
    """q [s, B, H·C], k, v [t, B, K·C], own index [s], first visible index [s, B], keys' index [t] -> o, log-sum-exp [B, H, s]."""

    differentiable = (0, 1, 2)
    input_keeps = ("in0", "in1", "in2", "in3", "in4", "in5", "out0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(width, int)
        return (ins[0],), (Spec((b, width // attrs["head_size"], s), "stat"),)

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        products = 2 if phase == "forward" else 5  # scores, values; again scores, dV, dP, dQ, dK
        return products * 2 * prod(ins[0]) * ins[1][0]


class MergeAttention(Body):
    """Two partial attentions (o, log-sum-exp) over different keys -> one."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (ins[0], ins[1]), ()


class RowMax(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec(ins[0].shape[:-1], "stat"),), ()


class ExpSum(Body):
    """logits [s, B, V@axis], their maximum and targets [s, B] -> [2, s, B]: Σ exp(logit - max), and the target's logit - max."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((2, *ins[1].shape), "stat"),), ()


class NegativeLogLikelihood(Body):
    """sums [2, s, B], max, targets -> Σ over targets [], log-sum-exp [s, B]."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "stat"), Spec(ins[1].shape, "stat")), ()


class CrossEntropyGradient(Body):
    """logits, log-sum-exp, targets, g [] -> (softmax - onehot)·g, zero where the target is ignored."""


class Loss(Body):
    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()


class Router(Body):
    """x [s, B, D], w [X, D] -> weights [s, B, k], experts [s, B, k], scores [s, B, X], choices [B, X]."""

    input_keeps = ("out1", "out2")
    weight_keeps = ("in0",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, _ = ins[0].shape
        x, k = weights[0][0], attrs["top_k"]
        return (Spec((s, b, k)), Spec((s, b, k), "index"), Spec((s, b, x), "stat"), Spec((b, x), "index")), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return (0, 2) if attrs["balance"] == "loss" else (0,)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        return (Spec((*ins[0].shape[:-1], attrs["experts"]), "stat"),)

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        return 2 * prod(ins[0]) * weights[0][0]


class SortByExpert(Body):
    """experts [s, B, k] -> order [s·B·k] (a stable sort of the copies by expert), copies of each expert [X]."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((prod(ins[0].shape),), "index"), Spec((attrs["experts"],), "index")), ()  # type: ignore[arg-type]


class SplitSizes(Body):
    """copies sent [X], copies coming [ep·X/ep] -> the host's sizes: the one look a step takes at routed counts."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "host"),), ()


class Dispatch(Body):
    """x [s, B, D], order [s·B·k] -> copies in expert order [s·B·k, D]."""

    input_keeps = ("in1",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((ins[1].shape[0], ins[0].shape[-1])),), ()


class Regroup(Body):
    """Rows [R, D] by sender, then expert -> by expert, then sender; `inverse` the other way."""


class Combine(Body):
    """copies y [s·B·k, D], weights [s, B, k], order -> [s, B, D], each token the weighted sum of its copies."""

    differentiable = (0, 1)
    input_keeps = ("in0", "in1", "in2")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[1].shape[:-1], ins[0].shape[-1])),), ()


class BalanceLoss(Body):
    """scores [s, B, X], choices [B, X] of the whole sequence -> Σ over sequences of f·P, this rank's tokens' share, []."""

    input_keeps = ("in0", "in1")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "stat"),), ()


class Tally(Body):
    """choices [B, X] are added to the step's count that moves the balance bias."""

    differentiable = ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (), ()


BODIES: dict[str, Body] = {
    "embedding": Embedding(),
    "linear": Linear(),
    "expert_linear": ExpertLinear(),
    "add_bias": AddBias(),
    "rms_norm": RmsNorm(),
    "layer_norm": LayerNorm(),
    "rope": Rope(),
    "swiglu": Swiglu(),
    "gelu": Gelu(),
    "add": Add(),
    "repeat_heads": RepeatHeads(),
    "attention": Attention(),
    "merge_attention": MergeAttention(),
    "row_max": RowMax(),
    "exp_sum": ExpSum(),
    "negative_log_likelihood": NegativeLogLikelihood(),
    "cross_entropy_gradient": CrossEntropyGradient(),
    "loss": Loss(),
    "router": Router(),
    "sort_by_expert": SortByExpert(),
    "split_sizes": SplitSizes(),
    "dispatch": Dispatch(),
    "regroup": Regroup(),
    "combine": Combine(),
    "balance_loss": BalanceLoss(),
    "tally": Tally(),
}
