"""Gradients on the wire in another dtype than they accumulate in: the sum takes the beginning of their own buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penteract.step.update import SLICE


def narrowed(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`whole` [n] as `dtype`, no wider, in its own place: what was there is lost.

    A slice is written where its elements, and those before, have been read.
    """
    if whole.dtype == dtype:
        return whole
    wire = whole.view(dtype)[: len(whole)]
    for at, end in _slices(len(whole)):
        wire[at:end].copy_(whole[at:end].to(dtype))
    return wire


def widened(whole: torch.Tensor, dtype: torch.dtype, part: range) -> None:
    """Elements `part` of a buffer that was narrowed, back in their places: from the last one down."""
    if whole.dtype == dtype:
        return
    wire = whole.view(dtype)
    for at, end in reversed(list(_slices(len(part)))):
        whole[part.start + at : part.start + end] = wire[part.start + at : part.start + end].to(whole.dtype)


def _slices(n: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + SLICE, n)) for at in range(0, n, SLICE))
