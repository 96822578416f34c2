"""Sequences of kernels that several declarations of plain torch share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from penteract.config.model import RopeScaling
from penteract.ops.declarations.traffic import Eager, Kernel
from penteract.ops.spec import Widths

Shape = tuple[int, ...]


def local_ids(e: Eager, tokens: int) -> tuple[Kernel, ...]:
    """Ids [tokens] -> rows or columns of this rank's shard, and masks of local and non-local ids."""
    shifted, compared = e.each(tokens, "index", "index"), e.each(tokens, "index", "mask", typed=True)
    both = e.each(tokens, "mask", "mask", "mask")
    return shifted, compared, compared, both, e.each(tokens, "index", "index", "mask", typed=True)


def local_targets(e: Eager, tokens: int) -> tuple[Kernel, ...]:
    """The same for targets, which are clamped."""
    *found, _ = local_ids(e, tokens)
    return *found, e.each(tokens, "index", "index")


def added(e: Eager, n: int, kind: str) -> Kernel:
    """A gradient of n elements, added to the bucket."""
    return e.each(n, "gradient", kind, "gradient")


def root_mean_square(e: Eager, n: int, rows: int, kind: str) -> tuple[Kernel, ...]:
    """The norm of each row, then in place: square, mean, plus epsilon, inverse root."""
    return e.sums((kind, n), ("stat", rows)), *[e.each(rows, "stat", "stat")] * 4


def angle_kernels(e: Eager, tokens: int, half: int, scaling: RopeScaling | None) -> Iterator[Kernel]:
    """Frequencies [half] and angles [tokens, half] in float64; a cosine and a sine of each, and the sine's sign."""
    one, angles = e.each(half, "double", "double"), tokens * half
    yield e.sums(("double", half))
    yield from (one, one)
    if scaling is not None:
        yield from _stretch(e, half, scaling)
    yield e.each(tokens, "index", "double")
    yield e.each(angles, ("double", tokens), ("double", half), "double")
    yield e.each(angles, "double", "stat")
    yield e.each(angles, "double", "double")
    if scaling is not None and scaling.attention_factor != 1:
        yield e.each(angles, "stat", "stat")
        yield e.each(angles, "double", "double")
    if e.widths["stat"] != e.widths["double"]:
        yield e.copy(angles, "double", "stat")
    yield e.each(angles, "stat", "stat")


def _stretch(e: Eager, half: int, scaling: RopeScaling) -> Iterator[Kernel]:
    """Scaled wavelengths: divided; or interpolated between themselves and their quotients, which takes four steps."""
    one = e.each(half, "double", "double")
    if scaling.kind == "linear":
        yield one
        return
    yield e.sums(("double", half)) if scaling.kind == "yarn" else one
    yield from (one, one, one, one)
    yield e.each(half, "double", "double", "double", "double")


def whole(widths: Widths, ins: Sequence[Shape]) -> Kernel:
    """Tensors `ins`, read and written once, as in a concatenation."""
    return Eager(widths).sums(("compute", 2 * sum(map(prod, ins))))


def cut_copies(e: Eager, shape: Shape, first: int) -> Iterator[Kernel]:
    """x [.., n] -> copies of its first columns and of the rest."""
    rows = prod(shape[:-1])
    for columns in (first, shape[-1] - first):
        yield e.copy(rows * columns, "compute", "compute", strided=rows > 1)
