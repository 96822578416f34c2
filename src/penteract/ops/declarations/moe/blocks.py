"""Ops on blocks of rows: to each of the `ranks` that share experts a rank sends `block` rows, however many copies of
its tokens go there, so the host reads no counts. A block's copies come first, by expert; what lies behind them is never
written, not read, and not defined.

If more than `block` copies go to one rank, the step is void: the device notes it (`Env.overflow`), and results are of
no meaning. What is read and written stays in bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from penteract.ops.declarations.declaration import BOOL, Attrs, OpDeclaration, Shape, Specs
from penteract.ops.declarations.traffic import Eager, Kernels
from penteract.ops.spec import Spec, Widths, room

# The op that each of them is recomputed and offloaded as, as of `PADDED`.
IN_BLOCKS: Mapping[str, str] = {"block_permute": "permute", "block_unpermute": "unpermute"}


def all_rows(attrs: Attrs) -> int:
    """Rows of all blocks, to or from all ranks."""
    return attrs["ranks"] * attrs["block"]


class BlockPlaces(OpDeclaration):
    """order [s·B·k], copies of each expert [X] -> the row of each copy in the blocks [s·B·k]; how many of each expert
    there is room for [X]: on a rank, its last experts are the first without any."""

    differentiable = ()

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec(ins[0].shape, "index"), Spec(ins[1].shape, "index")), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """What goes to each rank, the most of these, and whether it is too much; sums of copies, with each expert and
        before it; then where ranks begin and end, and each copy's number, rank, and what is before that."""
        copies, experts, ranks = prod(ins[0]), prod(ins[1]), attrs["ranks"]
        noted = (ranks + 1) * widths["index"] + BOOL
        return max(noted, max(ranks + 2 * experts, 2 * ranks + 3 * copies) * widths["index"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, copies, experts, ranks = Eager(widths), prod(ins[0]), prod(ins[1]), attrs["ranks"]
        one, every = ("index", ranks), ("index", copies)
        most = e.sums(one, ("index", 1)), e.each(1, "index", "mask", typed=True)
        noted = *most, e.each(1, "stat", "mask", "stat", typed=True)
        clamped = e.each(experts, "index", "index")
        less = e.each(experts, "index", "index", "index")
        begins = e.each(ranks, "index", "index"), e.each(ranks, "index", "index", "index")
        found = e.sums(every), e.places(max(ranks, copies), one, every, every), e.sums(every, ("index", 2 * copies))
        moved = e.each(copies, "index", "index", "index")
        return (
            e.sums(("index", experts), one), *noted, clamped, less, clamped, clamped, less, *begins, *found, moved,
            e.each(copies, "index", "index"), moved, e.places(copies, "index", "index", "index"),
        )  # fmt: skip


class BlockPermute(OpDeclaration):
    """x [s, B, D], places [s·B·k] -> copies at their places in the blocks [ranks·block, D]."""

    input_keeps = ("in1",)
    counts_rows = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((all_rows(attrs), ins[0].shape[-1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Of a gradient, places in order, the tokens there, and the gradients of all copies."""
        copies = prod(ins[1])
        return 0 if phase == "forward" else copies * (2 * widths["index"] + ins[0][-1] * widths["compute"])

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, tokens, copies = Eager(widths), prod(ins[0]), prod(ins[1])
        n = copies * ins[0][-1]
        if phase == "forward":
            return (e.places(n, ("index", copies), ("compute", tokens), "compute"),)
        return (
            e.sums(("index", 3 * copies)), e.each(copies, "index", "index"), e.each(tokens, "compute"),
            e.sums(("index", copies), ("compute", 2 * n)),
            e.places(n, ("index", copies), "compute", "compute", "compute"),
        )  # fmt: skip


class SortBlocks(OpDeclaration):
    """Rows in blocks by sender [ranks·block, D], copies coming from each for each of this rank's experts [ep·X/ep] ->
    by expert, then sender, one behind the other [rows, D]; `inverse`: the other way."""

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        rows = all_rows(attrs) if attrs["inverse"] else attrs["rows"]
        return (Spec((rows, ins[0].shape[-1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Where chunks of one sender and expert begin and end, both ways; then each row's number, its chunk, and how
        far it moves."""
        chunks, rows = prod(ins[1]), room(all_rows(attrs) if attrs["inverse"] else attrs["rows"])
        return max(5 * chunks, 2 * chunks + 3 * rows) * widths["index"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, chunks = Eager(widths), prod(ins[1])
        rows = all_rows(attrs) if attrs["inverse"] else attrs["rows"]
        n, one, every = rows * ins[0][-1], ("index", chunks), ("index", rows)
        summed, less = e.each(chunks, "index", "index"), e.each(chunks, "index", "index", "index")
        senders = e.sums(("index", attrs["ranks"])), e.each(chunks, "index", ("index", attrs["ranks"]), "index")
        transposed = e.each(chunks, "index", "index", strided=True)
        chunk_of = e.places(max(rows, chunks), one, every, every)
        found = e.sums(every), chunk_of, e.each(rows, "index", "index"), e.sums(every, ("index", 2 * rows))
        moved = e.each(rows, "index", "index", "index"), e.each(rows, "index", "index")
        return (
            summed, *senders, less, transposed, summed, less, transposed, less, *found, *moved,
            e.sums(every, ("compute", 2 * n)),
        )  # fmt: skip


class BlockUnpermute(OpDeclaration):
    """y [ranks·block, D], weights [s, B, k], places [s·B·k] -> [s, B, D], each token the weighted sum of its copies in
    the blocks."""

    differentiable = (0, 1)
    input_keeps = ("in0", "in1", "in2")
    counts_rows = True

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        return (Spec((*ins[1].shape[:-1], ins[0].shape[-1])),), ()

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """All copies; of a gradient, their products, and then their gradients."""
        return prod(ins[2]) * ins[0][-1] * widths["compute"]

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, copies, width = Eager(widths), prod(ins[2]), ins[0][-1]
        n, of_weights, of_tokens = copies * width, ("compute", copies), ("compute", copies // attrs["top_k"] * width)
        found = e.sums(("index", copies), ("compute", 2 * n))
        if phase == "forward":
            return found, e.each(n, "compute", of_weights, "compute"), e.sums(("compute", n), of_tokens)
        return (
            found, e.each(n, "compute", of_tokens, "compute"), e.sums(("compute", n), of_weights),
            e.each(n, of_tokens, of_weights, "compute"), e.places(n, ("index", copies), "compute", "compute"),
        )  # fmt: skip


BLOCKS: dict[str, OpDeclaration] = {
    "block_places": BlockPlaces(), "block_permute": BlockPermute(), "sort_blocks": SortBlocks(),
    "block_unpermute": BlockUnpermute(),
}  # fmt: skip
