"""Declarations of the mixture of experts: routing, permutation, expert layers, combination, balance."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import (
    BOOL,
    Attrs,
    OpDeclaration,
    Product,
    Shape,
    Specs,
    linear_products,
    narrow_product,
    wide_product,
    widened,
)
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Spec, Widths


class Router(OpDeclaration):
    """x [s, B, D], w [X, D] -> weights [s, B, k], experts [s, B, k], scores [s, B, X], choices [B, X].

    If experts form groups, a token chooses only among experts of its best groups (DeepSeek-V3 2412.19437 §2.1.2, eq.
    13-16).
    """

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

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return linear_products(phase, prod(ins[0][:-1]), ins[0][-1], weights[0][0])

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Routing uses the stat dtype: tokens and weights are converted for the products."""
        if phase == "weight_gradient":
            return widened(prod(ins[0]), widths) + wide_product(prod(weights[0]), widths)
        product = widened(prod(ins[0]) + prod(weights[0]), widths)
        return max(product, _routing_workspace(phase, ins, weights, attrs, widths))


def _routing_workspace(phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
    """Bytes of the choice of experts from logits, and of the logits' gradient: of a router without its products."""
    (s, b, _), stat = ins[0], widths["stat"]
    tokens, copies = s * b, s * b * attrs["top_k"]
    scores, row = tokens * weights[0][0] * stat, tokens * stat
    if phase == "forward":
        softmax = row if attrs["score"] == "softmax" else 0
        ranking = scores if attrs["bias"] or attrs["groups"] > 1 else 0
        choice = copies * stat + (row if attrs["normalize"] else 0)
        grouping = _grouping(tokens, attrs, widths) if attrs["groups"] > 1 else 0
        by_sequence = copies * widths["index"] if s > 1 and b > 1 else 0
        return max(softmax, ranking + max(choice, grouping), by_sequence)
    scaled = copies * stat if attrs["scale"] != 1 else widened(copies, widths)
    chosen = copies * stat + 2 * row if attrs["normalize"] else scaled
    return max(chosen, scores + row if attrs["score"] == "softmax" else 0)


def _grouping(tokens: int, attrs: Attrs, widths: Widths) -> int:
    """Bytes to find the best groups: scores of groups (of their best expert or best two), the choice, a mask of the
    rest.
    """
    stat, index = widths["stat"], widths["index"]
    scores, two = attrs["groups"] * stat, 2 * attrs["groups"] * (stat + index)
    by_two = two - 2 * attrs["groups"] * index + scores
    best = max(two, by_two) if attrs["group_score"] == "top2" else scores
    top = attrs["top_groups"]
    return tokens * max(best, scores + top * (stat + index), scores + top * index + attrs["groups"] * BOOL)


def sharing(attrs: Attrs) -> int:
    """The ranks that share experts and have the same copies, of an op that moves this rank's alone."""
    return attrs.get("ranks", 1)


def moved_rows(attrs: Attrs, copies: int) -> int:
    """The copies that `permute` makes: as many as routing gives this rank, where that is a number."""
    rows = attrs.get("rows")
    return rows if isinstance(rows, int) else copies // sharing(attrs)


class ExpertPermutation(OpDeclaration):
    """experts [s, B, k] -> order [s·B·k] (a stable sort of the copies by expert), copies of each expert [X].

    `ranks` share the experts, all of which have the same copies: those of this rank's experts come first, and only
    these are counted, [X/ranks].
    """

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        own = attrs["experts"] // sharing(attrs)
        return (Spec((prod(ins[0].shape),), "index"), Spec((own,), "index")), ()  # type: ignore[arg-type]

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """The sorted experts; of several ranks, each copy's distance from this rank's first expert too, and then the
        copies of its own and of all others."""
        copies = prod(ins[0])
        if sharing(attrs) == 1:
            return copies * widths["index"]
        return (copies + max(copies, attrs["experts"] // sharing(attrs) + 1)) * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, copies = Eager(widths), prod(ins[0])
        counted = e.places(copies, "index", "index", "index")
        own = attrs["experts"] // sharing(attrs)
        if sharing(attrs) == 1:
            return e.sums(("index", 3 * copies)), e.each(own, "index"), counted
        away, counts = e.each(copies, "index", "index"), e.each(own + 1, "index")
        return away, away, away, e.sums(("index", 3 * copies)), counts, counted, e.each(own, "index", "index")


class SplitSizes(OpDeclaration):
    """copies sent [X], copies received [ep·X/ep] -> sizes on the host: where a layer waits for routed counts."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((), "host"),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return (prod(ins[0]) + prod(ins[1])) * widths["index"]


class ExpertOffsets(OpDeclaration):
    """copies coming to this rank's experts [ep·X/ep], by sender -> where the rows of each begin, and the last of them
    end, [X/ep + 1]."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        (coming,) = ins[0].shape
        return (Spec((coming // attrs["ranks"] + 1,), "offset"),), ()  # type: ignore[operator]

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[0]) // attrs["ranks"] * widths["index"] if attrs["ranks"] > 1 else 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, coming = Eager(widths), prod(ins[0])
        own = coming // attrs["ranks"]
        summed = (e.sums(("index", coming), ("index", own)),) if attrs["ranks"] > 1 else ()
        return *summed, e.each(1, "offset"), e.each(own, "index", "offset")


class Permute(OpDeclaration):
    """x [s, B, D], order [s·B·k] -> copies in expert order [s·B·k, D]; of several `ranks`, the first `rows` of them,
    which this rank's experts get."""

    input_keeps = ("in1",)

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows = attrs.get("rows")
        return (Spec((ins[1].shape[0] if rows is None else rows, ins[0].shape[-1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[1]) * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, copies, width = Eager(widths), prod(ins[1]), ins[0][-1]
        own = moved_rows(attrs, copies)
        n, token = own * width, e.each(copies, "index", "index")
        if phase == "forward":
            return token, e.sums(("index", own), ("compute", 2 * n))
        summed = e.places(n, ("index", own), "compute", "compute", "compute")
        return e.each(prod(ins[0]), "compute"), token, summed


class SortChunks(OpDeclaration):
    """Rows [R, D] by sender, then expert, copies of each such chunk [ep·X/ep] -> by expert, then sender; `inverse`: the
    other way."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Where chunks begin; then each row's number, its chunk, and how far it moves."""
        chunks = prod(ins[1])
        return max(4 * chunks, 2 * chunks + 3 * ins[0][0]) * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, rows, chunks, n = Eager(widths), ins[0][0], prod(ins[1]), prod(ins[0])
        one, every = ("index", chunks), ("index", rows)
        transposed = e.each(chunks, "index", "index", strided=True)
        begins = e.sums(one, one), e.each(chunks, "index", "index", "index")
        chunk_of = e.places(max(rows, chunks), one, every, every)
        found = e.sums(every), chunk_of, e.sums(every, ("index", 2 * rows))
        moved = e.each(rows, "index", "index", "index")
        rows_of = e.sums(every, ("compute", 2 * n)) if attrs["inverse"] else e.places(n, every, "compute", "compute")
        ends, less = begins
        return ends, transposed, ends, less, transposed, less, less, *found, moved, rows_of


class ExpertLinear(OpDeclaration):
    """x [R, D], w [X, F, D] (one matrix per expert) -> [R, F]; `in1`: rows of each, as sizes on the host or offsets."""

    input_keeps = ("in1",)
    weight_keeps = ("in0", "in1")
    deferrable = True
    counts_rows = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((ins[0].shape[0], weights[0][1])),), ()

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        """Each expert's rows are data-dependent. Here rows are spread evenly, which gives the same FLOPs."""
        (rows, width), (experts, out, _) = ins[0], weights[0]
        each, more = rows // experts, rows % experts
        fewer, further = linear_products(phase, each, width, out), linear_products(phase, each + 1, width, out)
        return (
            *(p._replace(times=experts - more) for p in fewer),
            *(p._replace(times=more) for p in further if more),
        )

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """One expert at a time; experts without rows allocate nothing."""
        if phase != "weight_gradient" or not prod(ins[0]):
            return 0
        return narrow_product(prod(weights[0][1:]), widths)


class ExpertPair(ExpertLinear):
    """x [R, D], w1 [X, F, D], w2 [X, F, D] -> [R, F] of each; `in1`: as of `expert_linear`. The second product adds to
    the input gradient of the first."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return tuple(Spec((ins[0].shape[0], w[1])) for w in weights), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        return (0, 1)

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        return tuple(p for w in weights for p in super(ExpertPair, self).products(phase, ins, (w,), attrs))


class Unpermute(OpDeclaration):
    """copies y [s·B·k, D], weights [s, B, k], order -> [s, B, D], each token the weighted sum of its copies. Of several
    `ranks`, y has only the first of them, [R, D], and the others add nothing."""

    differentiable = (0, 1)
    input_keeps = ("in0", "in1", "in2")

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[1].shape[:-1], ins[0].shape[-1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        (rows, width), copies = ins[0], prod(ins[2])
        if phase == "forward":
            return copies * width * widths["compute"]
        return max((rows * width + rows) * widths["compute"], copies * widths["index"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, (rows, width), copies = Eager(widths), ins[0], prod(ins[2])
        n, every, of_rows, of_index = rows * width, copies * width, ("compute", rows), ("index", rows)
        some = sharing(attrs) > 1
        if phase == "forward":
            cleared = (e.each(every, "compute"),) if some else ()
            placed = e.places(n, of_index, "compute", "compute")
            weighed = e.each(every, "compute", ("compute", copies), "compute")
            return *cleared, placed, weighed, e.sums(("compute", every), ("compute", every // attrs["top_k"]))
        cleared = (e.each(copies, "compute"),) if some else ()
        at_order = e.places(rows, "index", "compute", "compute")
        return (
            e.each(copies, "index", "index"), e.sums(of_index, ("compute", 2 * n)), *cleared,
            e.each(n, "compute", "compute", "compute"), e.sums(("compute", n), of_rows), at_order, at_order,
            e.each(n, "compute", of_rows, "compute"),
        )  # fmt: skip


EXPERTS: dict[str, OpDeclaration] = {
    "router": Router(),
    "expert_permutation": ExpertPermutation(),
    "split_sizes": SplitSizes(),
    "expert_offsets": ExpertOffsets(),
    "permute": Permute(),
    "sort_chunks": SortChunks(),
    "expert_linear": ExpertLinear(),
    "expert_pair": ExpertPair(),
    "unpermute": Unpermute(),
}
