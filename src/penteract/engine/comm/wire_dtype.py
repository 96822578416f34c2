"""Gradients on the wire in another dtype than they accumulate in: the sum takes the beginning of their own buffer."""

from __future__ import annotations

import torch

from penteract.step.update import parts


def narrowed(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`whole` [n] as `dtype`, no wider, in its own place: what was there is lost.

    A slice is written where its elements, and those before, have been read.
    """
    if whole.dtype == dtype:
        return whole
    wire = whole.view(dtype)[: len(whole)]
    for part in parts(len(whole)):
        wire[part].copy_(whole[part].to(dtype))
    return wire


def widened(whole: torch.Tensor, dtype: torch.dtype, part: range) -> None:
    """Elements `part` of a buffer that was narrowed, back in their places: from the last one down."""
    if whole.dtype == dtype:
        return
    wire, whole = whole.view(dtype)[part.start : part.stop], whole[part.start : part.stop]
    for some in reversed(list(parts(len(part)))):
        whole[some] = wire[some].to(whole.dtype)
