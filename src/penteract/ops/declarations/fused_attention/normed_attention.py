"""Attention of query, key and value side by side whose query and key heads are normalised and rotated by position first
(QK-norm): what an edit of the tape (`ops/fuse.py`) puts in the place of norms, rotary positions and attention.

The product before it is plain, and its result stays as it is: backward of the norms reads it. Beside it are kept the
heads that attention reads, query and key, and their scales: together what the ops apart keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, prod

from penteract.config.layout import Layout
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
    widened,
)
from penteract.ops.declarations.dense import RmsNorm
from penteract.ops.declarations.fusions import PARTS, PackedAttention, rotation_cost, rotation_workspace, unpacked
from penteract.ops.declarations.kernel_sequences import added
from penteract.ops.declarations.traffic import Eager, Kernel
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

_NORM = RmsNorm()


class NormedAttention(PackedAttention):
    """As `packed_attention`, of heads that are neither normalised nor rotated; with them weights of both norms [C], [C]
    -> o [s, B, H·C], log-sum-exp [B, H, s], query and key heads as attention reads them [s, B, (H + K)·C], their
    scales [s, B, H + K]. The weights' gradients are handed on as `PARTS` partial sums [2, PARTS, C]."""

    input_keeps = (*PackedAttention.input_keeps, "extra1", "extra2")
    weight_keeps = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        outs, extras = super().results(ins, weights, attrs)
        rows, rotated = ins[0].shape[:-1], attrs["rotary_columns"]
        return outs, (*extras, Spec((*rows, rotated)), Spec((*rows, rotated // attrs["head_size"]), "stat"))

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        return (Spec((2, PARTS, attrs["head_size"]), "stat"),)

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return () if phase == "weight_gradient" else super().products(phase, ins, weights, attrs)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The inner's, with its copies; norms, of query and key one after the other, and rotation have theirs when it
        has none."""
        if phase == "weight_gradient":
            return weights[0][0] * widths["stat"] if self.copies else 0
        inner = super().workspace(phase, ins, (), attrs, widths)
        if not self.copies:
            return inner
        n, turning = prod(ins[0][:-1]) * max(attrs["widths"][:2]), rotation_workspace(ins[:2], attrs, widths)
        if phase == "forward":
            return max(inner, widened(n, widths), turning)
        about = [(n // attrs["head_size"], attrs["head_size"])], weights[:1], attrs, widths
        return max(inner, _NORM.workspace("input_gradient", *about))

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        if call.phase == "weight_gradient":
            return "pointwise", _seconds(rates, _sums(call, widths, in_place=not self.copies))
        plain = call._replace(ins=unpacked(call.ins, call.attrs), weights=())
        part, seconds = self.inner.cost(rates, plain, widths, registers)
        if not self.copies:
            one = one_pass_heads(call, widths)
            return part, seconds + rates.moved(one.moved)
        seconds += rotation_cost(rates, call.ins[:2], call.attrs, widths)
        seconds += rates.moved(2 * prod(call.ins[0]) * widths["compute"])
        return part, seconds + _seconds(rates, _norms(call, widths))


def one_pass_heads(call: CallShapes, widths: Widths) -> Kernel:
    """The kernel that normalises and turns all heads, or takes both out of their gradients, in place."""
    tokens, rotated, size = prod(call.ins[0][:-1]), call.attrs["rotary_columns"], call.attrs["head_size"]
    read = ("compute", 2 * size), ("index", tokens), ("stat", tokens * rotated // size)
    if call.phase == "forward":
        return Eager(widths).sums(("compute", 2 * tokens * rotated), *read)
    return Eager(widths).sums(("compute", 3 * tokens * rotated), *read, ("stat", 2 * PARTS * size))


def _norms(call: CallShapes, widths: Widths) -> list[Kernel]:
    """The kernels of both norms in plain torch."""
    phases = ("forward",) if call.phase == "forward" else ("input_gradient", "weight_gradient")
    shapes = [(*call.ins[0][:-1], width) for width in call.attrs["widths"][:2]]
    return [k for p in phases for shape in shapes for k in _NORM.traffic(p, [shape], call.weights, call.attrs, widths)]


def _sums(call: CallShapes, widths: Widths, *, in_place: bool) -> Sequence[Kernel]:
    """The kernels that sum both weights' gradients. `in_place`: straight into the bucket."""
    e, width = Eager(widths), call.weights[0][0]
    if in_place:
        return [e.sums(("stat", PARTS * width), ("gradient", 2 * width))] * 2
    return [e.sums(("stat", PARTS * width), ("stat", width)), added(e, width, "stat")] * 2


def _seconds(rates: WorkRates, kernels: Sequence[Kernel]) -> Seconds:
    return fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])


def normed(serves: Serves) -> Callable[[Site, Layout], OpDeclaration | None]:
    """Where an implementation of attention serves, it reads heads that a kernel has normalised and rotated."""

    def also(site: Site, layout: Layout) -> OpDeclaration | None:
        inner = serves(site, layout)
        return None if inner is None else NormedAttention(inner, copies=False)

    return also


NORMED_ATTENTION: dict[str, OpDeclaration] = {"normed_attention": NormedAttention()}
