"""Declarations of fused ops: what an edit of the tape (`ops/fuse.py`) puts in the place of several.

A packed register [s, B, n] holds what one product makes for several readers, side by side: query, key and value, or
gate and up. Rotary positions are applied to it in place by the product, and taken out of its gradient, in place, by
the attention that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import fsum, prod

from penteract.config.layout import Layout
from penteract.ops.declarations.attention import Attention
from penteract.ops.declarations.declaration import (
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
    narrow_product,
)
from penteract.ops.declarations.dense import Linear, RmsNorm, Rope, Swiglu
from penteract.ops.declarations.kernel_sequences import added
from penteract.ops.declarations.loss import LossAndGradient, SharedRowsLoss
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.declarations.wide_product import is_wide
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

PARTS = 512  # sums of a norm's weight gradient, each of some rows: fixed, so that results do not depend on the card

_ATTENTION = Attention()
_NORM, _ROPE = RmsNorm(), Rope()


class ForkNorm(RmsNorm):
    """x [.., D], w [D] -> RMSNorm of x, while x itself is read by another op too. Backward reads the gradient of both
    and makes their sum; the weight's gradient is handed on as `PARTS` partial sums [PARTS, D]. `largest_gradient`: the
    largest absolute value of that sum too, [1]."""

    forks = True
    weight_keeps = ()

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        largest = (Spec((1,), "stat"),) if attrs.get("largest_gradient") else ()
        return (Spec((PARTS, ins[0].shape[-1]), "stat"), *largest)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        if phase == "weight_gradient":
            return weights[0][0] * widths["stat"]
        return super().workspace(phase, ins, weights, attrs, widths)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        if phase == "weight_gradient":
            return e.sums(("stat", PARTS * width), ("stat", width)), added(e, width, "stat")
        kernels = super().traffic(phase, ins, weights, attrs, widths)
        if phase == "forward":
            return kernels
        scaled, slopes, summed, _ = super().traffic("weight_gradient", ins, weights, attrs, widths)
        branch = e.each(n, "compute", "compute", "compute")
        largest = (e.sums(("compute", n), ("stat", 1)),) if attrs.get("largest_gradient") else ()
        return (*kernels, branch, e.sums(("stat", PARTS * width)), scaled, slopes, summed, *largest)


class AddNorm(OpDeclaration):
    """x, y [.., D], w [D] -> x + y, rounded as a sum is, and its RMSNorm; keeps the norm's scale [.., 1]. Forward
    alone: backward is that of `add` and of the norm."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        outs, extras = _NORM.results(ins, weights, attrs)
        return (ins[0], *outs), extras

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return _NORM.workspace(phase, ins, weights, attrs, widths)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        total = Eager(widths).each(prod(ins[0]), "compute", "compute", "compute")
        return total, *_NORM.traffic(phase, ins, weights, attrs, widths)


class MergedLinear(Linear):
    """x [.., D], w1 [F1, D], w2 [F2, D], … -> [.., F1 + F2 + …]: one product.

    With positions [s, B] as second in, the first `rotary_columns` are heads that are rotated by them; the gradient
    that comes is of the columns before that.
    """

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[0].shape[:-1], _columns(weights))),), ()

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return linear_products(phase, prod(ins[0][:-1]), ins[0][-1], _columns(weights))

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        if phase == "weight_gradient":
            return max(narrow_product(prod(w), widths) for w in weights)
        return rotation_workspace(ins[:2], attrs, widths) if phase == "forward" and len(ins) > 1 else 0

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = super().cost(rates, call, widths, registers)
        if call.phase == "forward" and len(call.ins) > 1:
            seconds += rotation_cost(rates, call.ins[:2], call.attrs, widths)
        return part, seconds


class PackedSwiglu(Swiglu):
    """Gate and up side by side [.., 2·F] -> silu(gate) · up [.., F]."""

    differentiable = (0,)
    input_keeps = ("in0",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        *rows, width = ins[0].shape
        assert isinstance(width, int)
        return (Spec((*rows, width // 2)),), ()

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, apart = Eager(widths), prod(ins[0]) // 2, prod(ins[0][:-1]) > 1
        one, two = (e.each(n, *["compute"] * k, strided=apart) for k in (2, 3))
        return (one, two) if phase == "forward" else (one, two, two, two)


class PackedAttention(OpDeclaration):
    """Query, key and value side by side [s, B, (H + 2·K)·C], positions [s, B], then as `attention`: own index [s],
    first visible index [s, B], keys' index [t] -> o [s, B, H·C], log-sum-exp [B, H, s].

    `inner`: what computes attention of the three. `copies`: whether it wants each of them by itself, as plain torch
    does; kernels of a GPU read views, and turn gradients back in one pass.
    """

    part = "attention"
    input_keeps = ("in0", "in1", "in2", "in3", "in4", "out0", "extra0")

    def __init__(self, inner: OpDeclaration = _ATTENTION, *, copies: bool = True) -> None:
        """`inner`: the declaration of what computes attention; `copies`: of three contiguous tensors."""
        self.inner = inner
        self.copies = copies

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows = ins[0].shape[:-1]
        return self.inner.results([*(Spec((*rows, w)) for w in attrs["widths"]), *ins[2:]], weights, attrs)

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return self.inner.products(phase, unpacked(ins, attrs), weights, attrs)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The inner's; where it wants them apart, copies of query, key and value, and of their gradients too."""
        inner = self.inner.workspace(phase, unpacked(ins, attrs), weights, attrs, widths)
        apart = self.copies * prod(ins[0]) * widths["compute"]
        if phase == "forward":
            return inner + apart
        turning = rotation_workspace(ins[:2], attrs, widths) if self.copies else 0
        return max(inner + 2 * apart, turning)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = self.inner.cost(rates, call._replace(ins=unpacked(call.ins, call.attrs)), widths, registers)
        if not self.copies:
            turning = one_pass_rotation(rates, call.ins, call.attrs, widths)
            return part, seconds + (turning if call.phase != "forward" else 0.0)
        if call.phase != "forward":
            seconds += rotation_cost(rates, call.ins[:2], call.attrs, widths)
        return part, seconds + rates.moved(2 * prod(call.ins[0]) * widths["compute"])


class OnePassForkNorm(ForkNorm):
    """By kernels that read and write each tensor once."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, width = Eager(widths), prod(ins[0]), weights[0][0]
        partial = ("stat", PARTS * width)
        if phase == "weight_gradient":
            return (e.sums(partial, ("gradient", 2 * width)),)
        if phase == "forward":
            return (e.sums(("compute", 2 * n), ("stat", n // width)),)
        return (e.sums(("compute", 4 * n), ("stat", n // width), partial),)


class OnePassAddNorm(AddNorm):
    """By one kernel, which norms the sum while it has it."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        n, width = prod(ins[0]), weights[0][0]
        return (Eager(widths).sums(("compute", 4 * n + width), ("stat", n // width)),)


class OneProduct(MergedLinear):
    """One product where the weights lie behind each other, and gradients of 16-bit factors made in the bucket."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        wide = phase != "weight_gradient" or is_wide(widths)
        return 0 if wide else narrow_product(sum(map(prod, weights)), widths)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        part, seconds = Linear.cost(self, rates, call, widths, registers)
        if call.phase == "forward" and len(call.ins) > 1:
            seconds += one_pass_rotation(rates, call.ins, call.attrs, widths)
        return part, seconds


class OnePassPackedSwiglu(PackedSwiglu):
    """By one kernel each way."""

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n = Eager(widths), prod(ins[0])
        return (e.sums(("compute", n + n // 2 if phase == "forward" else 2 * n + n // 2)),)


def one_pass(name: str) -> Serves:
    """A fused op by kernels of a GPU, where the layout asks for them."""
    declaration = _ONE_PASS[name]
    return lambda site, layout: declaration if layout.elementwise == "triton" else None


def one_pass_rotation(rates: WorkRates, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Seconds:
    """Seconds of a kernel that rotates the first `rotary_columns` in place."""
    return rates.moved(2 * prod(ins[0][:-1]) * attrs["rotary_columns"] * widths["compute"])


def packed(serves: Serves) -> Callable[[Site, Layout], OpDeclaration | None]:
    """Where an implementation of attention serves, it serves packed registers too: it reads and writes them as they
    lie."""

    def also(site: Site, layout: Layout) -> OpDeclaration | None:
        inner = serves(site, layout)
        return None if inner is None else PackedAttention(inner, copies=False)

    return also


def unpacked(ins: Sequence[Shape], attrs: Attrs) -> list[Shape]:
    """Shapes of what attention reads: query, key and value apart, and no positions."""
    return [*((*ins[0][:-1], w) for w in attrs["widths"]), *ins[2:]]


def columns(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each of several tensors of these widths begins and ends in a packed register."""
    ends = list(accumulate(widths))
    return list(zip([0, *ends], ends, strict=False))


def rotation_workspace(ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
    """Bytes of rotating the first `rotary_columns` in place: angles, then both halves of what turns."""
    rotated, stat = (*ins[0][:-1], attrs["rotary_columns"]), widths["stat"]
    half = (attrs["head_size"] - attrs["plain_size"]) // 2
    elements = prod(rotated) // attrs["head_size"] * half
    return max(
        _ROPE.workspace("forward", [rotated, ins[1]], (), attrs, widths), 2 * (prod(ins[1]) * half + elements) * stat
    )


def rotation_cost(rates: WorkRates, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> Seconds:
    """Seconds of rotating the first `rotary_columns` columns."""
    kernels = _ROPE.traffic("forward", [(*ins[0][:-1], attrs["rotary_columns"]), ins[1]], (), attrs, widths) or ()
    return fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])


def _columns(weights: Sequence[Shape]) -> int:
    return sum(w[0] for w in weights)


FUSIONS: dict[str, OpDeclaration] = {
    "fork_norm": ForkNorm(),
    "add_norm": AddNorm(),
    "merged_linear": MergedLinear(),
    "packed_swiglu": PackedSwiglu(),
    "loss_and_gradient": LossAndGradient(),
    "packed_attention": PackedAttention(),
}

_ONE_PASS: dict[str, OpDeclaration] = {
    "fork_norm": OnePassForkNorm(),
    "add_norm": OnePassAddNorm(),
    "loss_and_gradient": SharedRowsLoss(),
    "merged_linear": OneProduct(),
    "packed_swiglu": OnePassPackedSwiglu(),
}
