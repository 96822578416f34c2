"""Declarations of attention and of merging its parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.bodies.body import BOOL, Attrs, Body, Product, Shape, Specs, mixed
from penteract.ops.spec import Spec, Widths


class Attention(Body):
    """q [s, B, H·C], k, v [t, B, K·C], own index [s], first visible index [s, B], keys' index [t]
    -> o [s, B, H·C], log-sum-exp [B, H, s]."""

    differentiable = (0, 1, 2)
    input_keeps = ("in0", "in1", "in2", "in3", "in4", "in5", "out0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(width, int)
        return (ins[0],), (Spec((b, width // attrs["head_size"], s), "stat"),)

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        """A head's scores and values; backward: again scores, dV, dP, dQ, dK. Masked scores are computed too."""
        (s, b, width), t, c = ins[0], ins[1][0], attrs["head_size"]
        heads = b * (width // c)
        wide, long = Product(heads, s, t, c), Product(heads, s, c, t)
        back = Product(heads, t, c, s)
        return (wide, long) if phase == "forward" else (wide, back, wide, long, back)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The scores in full, in stat; where compute is narrower, in compute too around each matrix product."""
        compute, stat = widths["compute"], widths["stat"]
        (s, b, width), t = ins[0], ins[1][0]
        q, kv = prod(ins[0]) * compute, prod(ins[1]) * compute
        row = b * (width // attrs["head_size"]) * s * stat
        wide, narrow = row * t, row * t // stat * compute
        cast = narrow if mixed(widths) else 0
        mask = (b + 1) * s * t * BOOL + (s * widths["index"] if attrs["window"] else 0)
        grouped = q if ins[1][2] < width and s > 1 else 0  # r query heads of a KV head as r·s rows
        if phase == "forward":
            return max(grouped + wide + max(mask, cast), wide + 2 * row, narrow + q)
        scores = wide + max(mask, cast)
        slopes = wide + narrow + (wide if mixed(widths) else 0)
        values = wide + cast + kv
        return row + max(q, 2 * grouped + max(scores, wide + row, values, slopes, narrow + q, narrow + kv))


class MergeAttention(Body):
    """Two partial attentions (o, log-sum-exp) over different keys -> one."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (ins[0], ins[1]), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return (prod(ins[0]) + 2 * prod(ins[1])) * widths["stat"]


ATTENTION: dict[str, Body] = {"attention": Attention(), "merge_attention": MergeAttention()}
