"""Rectangles of global tensors as torch tensors: slices that ranks hold, views and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penteract.engine.checkpoint.boxes import Box, Dims

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


def view(tensor: torch.Tensor, box: Box, origin: Sequence[int]) -> torch.Tensor:
    """The view of `tensor` at `box` of the global tensor, in which `tensor` begins at `origin`."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start - origin[dim], size)
    return tensor


def raw(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes in row-major order, without a copy if it is contiguous."""
    numbers: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
