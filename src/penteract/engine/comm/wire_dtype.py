"""Reduce gradients in a narrower dtype than they accumulate in. The narrow values use the beginning of the same
buffer."""

from __future__ import annotations

import torch

from penteract.step.update import parts


def narrowed(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `whole` [n] to `dtype`, which is not wider, in place; the old values are lost.

    Slices go forwards, so each is written over elements that have been read.
    """
    if whole.dtype == dtype:
        return whole
    wire = whole.view(dtype)[: len(whole)]
    for part in parts(len(whole)):
        wire[part].copy_(whole[part].to(dtype))
    return wire


def widened(whole: torch.Tensor, dtype: torch.dtype, part: range) -> None:
    """Cast elements `part` of a narrowed buffer back, in place. Slices go backwards, so each is written over elements
    that have been read."""
    if whole.dtype == dtype:
        return
    wire, whole = whole.view(dtype)[part.start : part.stop], whole[part.start : part.stop]
    for own in reversed(list(parts(len(part)))):
        whole[own] = wire[own].to(whole.dtype)
