"""Ops that are one kernel: it reads each register once, computes in fp32, and writes each result once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import FLOAT, Attrs, OpDeclaration, Serves, Shape
from penteract.ops.declarations.dense import Embedding, RmsNorm, Rope, Swiglu
from penteract.ops.declarations.fusions import PARTS
from penteract.ops.declarations.loss import CrossEntropyGradient, ExpSum, LogitsGradient, NegativeLogLikelihood, RowMax
from penteract.ops.declarations.moe.one_pass_experts import ONE_PASS_EXPERTS
from penteract.ops.declarations.moe.padded_rows import PaddedSwiglu
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Widths
from penteract.ops.tape import Site


def gpu_kernels(declaration: OpDeclaration) -> Serves:
    """Where a layout asks for GPU kernels."""

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        return declaration if layout.elementwise == "triton" else None

    return serves


def parts(rows: int) -> int:
    """Partial sums of a weight gradient over so many rows."""
    return min(PARTS, rows)


class OnePassNorm(RmsNorm):
    """Its weight gradient is two kernels: `PARTS` sums, each of some rows, and the sum of those."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        width = weights[0][0]
        return parts(prod(ins[0]) // width) * width * FLOAT if phase == "weight_gradient" else 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        rows = n // width
        if phase == "weight_gradient":
            some = ("stat", parts(rows) * width)
            return e.sums(("compute", 2 * n), ("stat", rows), some), e.sums(some, ("gradient", 2 * width))
        read = 1 if phase == "forward" else 2
        return (e.sums(("compute", (read + 1) * n + width), ("stat", rows)),)


class OnePassSwiglu(Swiglu):
    """Gate and up are read once, and so is the gradient."""

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).sums(("compute", (3 if phase == "forward" else 5) * prod(ins[0]))),)


class OnePassPaddedSwiglu(OnePassSwiglu, PaddedSwiglu):
    """How many rows there are is read on the device."""

    counts_rows = True


class OnePassRope(Rope):
    """Angles are made in registers, once for all heads of a token."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).sums(("compute", 2 * prod(ins[0])), ("index", prod(ins[1]))),)


class OnePassEmbedding(Embedding):
    """Backward sorts the ids; a kernel then sums the rows of each run of one id, in the order of the tokens."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Sorted ids, and whose they are."""
        if phase == "forward":
            return super().workspace(phase, ins, weights, attrs, widths)
        return 2 * prod(ins[0]) * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """What clears the bucket for the first is not counted, and every id is its own run."""
        if phase == "forward":
            return super().traffic(phase, ins, weights, attrs, widths)
        e, tokens = Eager(widths), prod(ins[0])
        n = tokens * weights[0][1]
        return e.sums(("index", 3 * tokens)), e.sums(("index", 2 * tokens), ("compute", n), ("gradient", 2 * n))


class OnePassRowMax(RowMax):
    """Each row is read once."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).sums(("compute", prod(ins[0])), ("stat", prod(ins[0][:-1]))),)


class OnePassExpSum(ExpSum):
    """Each row is read once: no exponential leaves the registers."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        tokens = prod(ins[2])
        return (Eager(widths).sums(("compute", prod(ins[0])), ("index", tokens), ("stat", 3 * tokens)),)


class OnePassLikelihood(NegativeLogLikelihood):
    """Sums over tokens in one order, by one block of threads."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        tokens = prod(ins[2])
        return (Eager(widths).sums(("stat", 4 * tokens + 1 + bool(attrs.get("z"))), ("index", tokens)),)


def _of_gradient(ins: Sequence[Shape], widths: Widths) -> Kernels:
    """Logits are read and gradients written."""
    tokens = prod(ins[2])
    return (Eager(widths).sums(("compute", 2 * prod(ins[0])), ("stat", tokens + 1), ("index", tokens)),)


class OnePassCrossEntropyGradient(CrossEntropyGradient):
    """Probabilities stay in registers."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return _of_gradient(ins, widths)


class OnePassLogitsGradient(LogitsGradient):
    """The same, where the logits were."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return _of_gradient(ins, widths)


ONE_PASS: dict[str, OpDeclaration] = {
    "rms_norm": OnePassNorm(),
    "swiglu": OnePassSwiglu(),
    "padded_swiglu": OnePassPaddedSwiglu(),
    "rope": OnePassRope(),
    "embedding": OnePassEmbedding(),
    "row_max": OnePassRowMax(),
    "exp_sum": OnePassExpSum(),
    "negative_log_likelihood": OnePassLikelihood(),
    "cross_entropy_gradient": OnePassCrossEntropyGradient(),
    "logits_gradient": OnePassLogitsGradient(),
    **ONE_PASS_EXPERTS,
}
