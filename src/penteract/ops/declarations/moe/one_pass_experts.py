"""Routing by kernels that read and write each tensor once, without atomics: where a token's copies lie is found first,
so that whoever sums them, or sends them, goes from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import FLOAT, Attrs, OpDeclaration, Shape
from penteract.ops.declarations.moe.blocks import BlockPermute, BlockPlaces, BlockUnpermute, SortBlocks
from penteract.ops.declarations.moe.experts import (
    ExpertPermutation,
    Permute,
    SortChunks,
    Unpermute,
    moved_rows,
    sharing,
)
from penteract.ops.declarations.moe.padded_rows import PaddedPermute, PaddedUnpermute
from penteract.ops.declarations.traffic import Eager, Kernel, Kernels
from penteract.ops.spec import Widths

COPIES = 128  # that one program counts and places
PLACE = FLOAT  # bytes of an int32


def counted(copies: int, experts: int) -> int:
    """Counts of each expert in every block of `COPIES`."""
    return -(-copies // COPIES) * experts


class OnePassPermutation(ExpertPermutation):
    """Counts of each block, their sums over the blocks before, then each copy's place: three kernels. Those of other
    ranks' experts are counted together."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return counted(prod(ins[0]), _bins(attrs)) * PLACE

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        copies, index = prod(ins[0]), widths["index"]
        table, all_of_them = counted(copies, _bins(attrs)) * PLACE, attrs["experts"] // sharing(attrs) * index
        return (
            Kernel(copies * index + table),
            Kernel(2 * table + all_of_them),
            Kernel(copies * (2 * index + PLACE) + all_of_them),
        )


def _bins(attrs: Attrs) -> int:
    """What copies are counted by: this rank's experts, and, where there are others, the rest."""
    return attrs["experts"] // sharing(attrs) + (sharing(attrs) > 1)


def _places(copies: int, widths: Widths) -> Kernel:
    """What finds the place of each copy."""
    return Kernel(copies * (widths["index"] + PLACE))


class OnePassPermute(Permute):
    """Each token is read once; of a gradient, each copy."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[1]) * PLACE

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        copies, compute = prod(ins[1]), widths["compute"]
        moved = (prod(ins[0]) + moved_rows(attrs, copies) * ins[0][-1]) * compute
        return _places(copies, widths), Kernel(moved + copies * PLACE)


class OnePassUnpermute(Unpermute):
    """Each copy is read once; of a gradient, each token too, and gradients are written."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return prod(ins[2]) * PLACE

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        e, n, copies = Eager(widths), prod(ins[0]), prod(ins[2])
        of_tokens, of_weights = copies // attrs["top_k"] * ins[0][-1], copies
        if phase != "forward":
            n, of_weights = 2 * n, 2 * copies
        moved = e.sums(("compute", n + of_tokens + of_weights))
        return _places(copies, widths), Kernel(moved.moved + copies * PLACE)


class OnePassSort(SortChunks):
    """Where chunks end and begin; then each row is read once."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 2 * prod(ins[1]) * PLACE if ins[0][0] else 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        chunks = prod(ins[1])
        return (
            Kernel(2 * chunks * (widths["index"] + PLACE)),
            Kernel(2 * prod(ins[0]) * widths["compute"] + 2 * chunks * PLACE),
        )


class OnePassPaddedPermute(OnePassPermute, PaddedPermute):
    """How many rows there are is read where a row is moved."""

    counts_rows = True


class OnePassPaddedUnpermute(OnePassUnpermute, PaddedUnpermute):
    """The same."""

    counts_rows = True


class OnePassBlockPlaces(BlockPlaces):
    """Each copy is placed by itself, from the counts. Too many are noted by one write, where there are."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        return (Eager(widths).sums(("index", 2 * (prod(ins[0]) + prod(ins[1])))),)


class OnePassBlockPermute(BlockPermute):
    """Each token is read once; of a gradient, each copy."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        copies = prod(ins[1])
        moved = prod(ins[0]) + copies * ins[0][-1]
        return (Eager(widths).sums(("compute", moved), ("index", copies)),)


class OnePassBlockUnpermute(BlockUnpermute):
    """Each copy is read once; of a gradient, each token too, and gradients are written."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        copies, width, times = prod(ins[2]), ins[0][-1], 1 if phase == "forward" else 2
        moved = times * copies * (width + 1) + copies // attrs["top_k"] * width
        return (Eager(widths).sums(("compute", moved), ("index", copies)),)


class OnePassBlockSort(SortBlocks):
    """Where chunks end and begin; then each row that is there is read once."""

    counts_rows = True

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        return 2 * prod(ins[1]) * PLACE

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels:
        chunks, moved = prod(ins[1]), attrs["rows"] * ins[0][-1]
        return (
            Kernel(2 * chunks * (widths["index"] + PLACE)),
            Kernel(2 * moved * widths["compute"] + 2 * chunks * PLACE),
        )


ONE_PASS_EXPERTS: dict[str, OpDeclaration] = {
    "expert_permutation": OnePassPermutation(),
    "permute": OnePassPermute(),
    "padded_permute": OnePassPaddedPermute(),
    "padded_unpermute": OnePassPaddedUnpermute(),
    "sort_chunks": OnePassSort(),
    "unpermute": OnePassUnpermute(),
    "block_places": OnePassBlockPlaces(),
    "block_permute": OnePassBlockPermute(),
    "sort_blocks": OnePassBlockSort(),
    "block_unpermute": OnePassBlockUnpermute(),
}
