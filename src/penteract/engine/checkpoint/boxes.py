"""Boxes of global tensors, overlaps, digests, and the names of dtypes: what a checkpoint is made of, without torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Dims = tuple[int, ...]
Box = tuple[Dims, Dims]  # offset, size

# The names that the safetensors format gives to dtypes, and the bytes of an element.
WIDTHS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
        "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    }
)  # fmt: skip


def inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box lies inside a tensor of this shape."""
    offset, size = box
    return len(offset) == len(size) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(offset, size, shape, strict=True)
    )


def meet(a: Box, b: Box) -> Box | None:
    """The overlap of two boxes of one tensor; None if there is none."""
    start = tuple(max(i, j) for i, j in zip(a[0], b[0], strict=True))
    ends = (min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True))
    size = tuple(e - s for s, e in zip(start, ends, strict=True))
    return (start, size) if all(n > 0 for n in size) else None


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(box[1])


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that overlap, if any do.

    Sweeps along the dim with the most cuts, so that boxes cut along one dim cost n log n and not n².
    """
    solid = [b for b in boxes if volume(b)]
    if len(solid) < 2:
        return None
    dims = range(len(solid[0][0]))
    along = max(dims, key=lambda d: len({b[0][d] for b in solid}), default=None)
    if along is None:  # two scalars
        return solid[0], solid[1]
    open_boxes: list[Box] = []
    for box in sorted(solid, key=lambda b: b[0][along]):
        open_boxes = [b for b in open_boxes if b[0][along] + b[1][along] > box[0][along]]
        for other in open_boxes:
            if meet(box, other):
                return other, box
        open_boxes.append(box)
    return None


def dims_of(values: Any) -> Dims:
    """Numbers of a file as dims. Raises TypeError or ValueError for others, and where there are too many elements to
    count."""
    found = tuple(count_of(v) for v in values)
    count_of(math.prod(found))
    return found


def count_of(value: Any) -> int:
    """A number of a file as a count. Raises ValueError for others."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def digest(data: memoryview | bytes) -> str:
    """BLAKE2b, 256 bits, as hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def digest_of_parts() -> hashlib.blake2b:
    """The same digest, to which data are added part by part."""
    return hashlib.blake2b(digest_size=32)


def show(box: Box) -> str:
    """A box as Python would slice it: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*box, strict=True)) + "]"
