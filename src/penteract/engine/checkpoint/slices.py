"""Rectangles of global tensors: slices that ranks hold, overlaps of boxes, views and digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Dims = tuple[int, ...]
Box = tuple[Dims, Dims]  # offset, size

# The names that the safetensors format gives to dtypes.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of the global tensor `name` of shape `shape`, which begins at `offset` and is held in `tensor`.

    `owner`: this rank writes it. Exactly one rank owns each element of a tensor.
    """

    name: str
    shape: Dims
    offset: Dims
    tensor: torch.Tensor
    owner: bool = True

    @property
    def box(self) -> Box:
        """(offset, size) in the global tensor."""
        return tuple(self.offset), tuple(self.tensor.shape)


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


def view(tensor: torch.Tensor, box: Box, origin: Sequence[int]) -> torch.Tensor:
    """The view of `tensor` at `box` of the global tensor, in which `tensor` begins at `origin`."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start - origin[dim], size)
    return tensor


def raw(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes in row-major order, without a copy if it is contiguous."""
    numbers: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def digest(data: memoryview | bytes) -> str:
    """BLAKE2b, 256 bits, as hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def show(box: Box) -> str:
    """A box as Python would slice it: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*box, strict=True)) + "]"
