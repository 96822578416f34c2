"""Ops on registers with room for the most rows that routing can send to a rank's experts. How many there are is known
on the device alone: the last of `offsets` [X/ep + 1]. What lies behind them is not read, and not defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from penteract.ops.declarations.declaration import BOOL, Attrs, OpDeclaration, Shape
from penteract.ops.declarations.dense import Swiglu
from penteract.ops.declarations.moe.experts import Permute, Unpermute, moved_rows
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Widths, room

# The op that each of them is recomputed and offloaded as: they are recorded so, and messages name it (`ops/fuse.py`).
PADDED: Mapping[str, str] = {
    "padded_permute": "permute", "padded_swiglu": "swiglu", "padded_unpermute": "unpermute",
}  # fmt: skip


def _behind(rows: int, widths: Widths) -> tuple[int, int]:
    """Bytes of a mask of the rows behind those that there are, and of the rows' numbers, which it is made from."""
    return rows * BOOL, rows * widths["index"]


def _masked(e: Eager, rows: int) -> Kernels:
    """What makes the mask."""
    return e.sums(("index", rows)), e.each(rows, "index", ("offset", 1), "mask")


class PaddedPermute(Permute):
    """x [s, B, D], order [s·B·k], offsets -> copies in the order of this rank's experts [rows, D]."""

    input_keeps = ("in1", "in2")

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Each copy's token; of a gradient, the mask, and then the gradient with zeros behind it."""
        tokens = prod(ins[1]) * widths["index"]
        if phase == "forward":
            return tokens
        rows = room(attrs["rows"])
        mask, numbers = _behind(rows, widths)
        return tokens + mask + max(numbers, rows * ins[0][-1] * widths["compute"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        plain = super().traffic(phase, ins, weights, attrs, widths)
        if phase == "forward":
            return plain
        e, rows = Eager(widths), moved_rows(attrs, prod(ins[1]))
        return *plain, *_masked(e, rows), e.each(rows * ins[0][-1], "compute", ("mask", rows), "compute")


class PaddedSwiglu(Swiglu):
    """gate, up [rows, F], offsets -> silu(gate) · up."""

    input_keeps = ("in0", "in1", "in2")


class PaddedUnpermute(Unpermute):
    """copies y [rows, D], weights [s, B, k], order, offsets -> [s, B, D], each token the weighted sum of its copies
    here."""

    input_keeps = ("in0", "in1", "in2", "in3")

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The mask, the rows with zeros behind it, then these and all copies. Of gradients, products of the rows; their
        sums, and the mask."""
        (rows, width), copies, compute = ins[0], prod(ins[2]), widths["compute"]
        mask, numbers = _behind(rows, widths)
        if phase == "forward":
            masked = rows * width * compute
            return max(mask + numbers, mask + masked, masked + copies * width * compute)
        return max((rows * width + rows) * compute, rows * compute + mask + numbers, copies * widths["index"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        plain, e, (rows, width) = super().traffic(phase, ins, weights, attrs, widths), Eager(widths), ins[0]
        if phase == "forward":
            return *plain, *_masked(e, rows), e.each(rows * width, "compute", ("mask", rows), "compute")
        return *plain, *_masked(e, rows), e.each(rows, "compute", "mask", "compute", typed=True)


PADDED_ROWS: dict[str, OpDeclaration] = {
    "padded_permute": PaddedPermute(), "padded_swiglu": PaddedSwiglu(), "padded_unpermute": PaddedUnpermute(),
}  # fmt: skip
