"""Declarations of attention, and of merging partial attentions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import BOOL, Attrs, OpDeclaration, Product, Shape, Specs, mixed
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Spec, Widths


class Attention(OpDeclaration):
    """q [s, B, H·C], k [t, B, K·C], v [t, B, K·E], own index [s], first visible index [s, B], keys' index [t]
    -> o [s, B, H·E], log-sum-exp [B, H, s].   C is `head_size`, E `value_size`; scores are multiplied by `scale`."""

    part = "attention"
    differentiable = (0, 1, 2)
    input_keeps = ("in0", "in1", "in2", "in3", "in4", "in5", "out0", "extra0")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        s, b, width = ins[0].shape
        assert isinstance(width, int)
        heads = width // attrs["head_size"]
        return (Spec((s, b, heads * attrs["value_size"])),), (Spec((b, heads, s), "stat"),)

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        """A head's scores and values; backward: scores again, dV, dP, dQ, dK. Masked scores are computed too."""
        (s, b, width), t, c, e = ins[0], ins[1][0], attrs["head_size"], attrs["value_size"]
        heads = b * (width // c)
        scores = Product(heads, s, t, c)
        if phase == "forward":
            return scores, Product(heads, s, e, t)
        dv, dp = Product(heads, t, e, s), Product(heads, s, t, e)
        return scores, dv, dp, Product(heads, s, c, t), Product(heads, t, c, s)

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """All scores, in the stat dtype; if compute is narrower, also in compute around each matrix product.

        In bytes: `row`, one number for each query of a head; `wide` and `narrow`, all scores in the stat and in the
        compute dtype. The result is the largest sum of what is alive at once.
        """
        compute, stat = widths["compute"], widths["stat"]
        (s, b, width), t = ins[0], ins[1][0]
        q, k, v = (prod(shape) * compute for shape in ins[:3])
        o = q // attrs["head_size"] * attrs["value_size"]
        row = b * (width // attrs["head_size"]) * s * stat
        wide, narrow = row * t, row * t // stat * compute
        cast = narrow if mixed(widths) else 0
        mask = (b + 1) * s * t * BOOL + (s * widths["index"] if attrs["window"] else 0)
        grouped = ins[1][2] < width and s > 1  # r query heads of a KV head as r·s rows: copies
        if phase == "forward":
            return max(grouped * q + wide + max(mask, cast), wide + 2 * row, narrow + o)
        scores = wide + max(mask, cast)
        slopes = wide + narrow + (wide if mixed(widths) else 0)
        values = wide + cast + v
        worst = max(scores, wide + row, values, slopes, narrow + q, narrow + k)
        return row + max(o, grouped * (q + o) + worst)


class MergeAttention(OpDeclaration):
    """Two partial attentions (o, log-sum-exp) over different keys -> one."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (ins[0], ins[1]), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return (prod(ins[0]) + 2 * prod(ins[1])) * widths["stat"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        """Log-sum-exps [rows], and the outputs that they weight [rows, features]."""
        e, n, rows = Eager(widths), prod(ins[0]), prod(ins[1])
        two, one, of_rows = e.each(rows, "stat", "stat", "stat"), e.each(rows, "stat", "stat"), ("stat", rows)
        scaled, summed = e.each(n, "compute", of_rows, "stat"), e.each(n, "stat", "compute", of_rows, "stat")
        return two, two, one, two, one, scaled, summed, e.copy(n, "stat", "compute")


class UnfoldHeads(OpDeclaration):
    """Each head's unrotated key and value [t, B, H·(P+E)], and the rotated key [t, B, R] that all heads share
    -> k [t, B, H·(P+R)], v [t, B, H·E].   P is `plain_size`, E `value_size`."""

    differentiable = (0, 1)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        (*rows, width), rotated = ins[0].shape, ins[1].shape[-1]
        assert isinstance(width, int) and isinstance(rotated, int)
        heads = width // (attrs["plain_size"] + attrs["value_size"])
        key = Spec((*rows, heads * (attrs["plain_size"] + rotated)))
        return (key, Spec((*rows, heads * attrs["value_size"]))), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return (0, 1)

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, rotated, size = Eager(widths), prod(ins[1]), attrs["plain_size"] + attrs["value_size"]
        heads = prod(ins[0]) // size
        copies = [e.copy(heads * attrs[n], "compute", "compute", strided=True) for n in ("plain_size", "value_size")]
        every = heads * ins[1][-1]
        if phase == "forward":
            return copies[0], e.copy(every, ("compute", rotated), "compute", strided=True), copies[1]
        return *copies, e.sums(("compute", every), ("compute", rotated))


ATTENTION: dict[str, OpDeclaration] = {
    "attention": Attention(),
    "merge_attention": MergeAttention(),
    "unfold_heads": UnfoldHeads(),
}
