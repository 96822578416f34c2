"""Experts' products by torch, whose weight gradients go into their bucket in one pass: cleared where an expert has no
rows, converted, and added."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.moe.grouped_experts import MadeBeside, by_torch, expert_products
from penteract.engine.kernels.triton.bits import narrow, wide

_TILE = 4096  # elements of a program


@triton.jit
def _put_sums(made, offsets, into, size, ADD: tl.constexpr, TILE: tl.constexpr):
    """made [X, size] -> into [X, size]; of experts without rows, zeros."""
    expert = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = expert.to(tl.int64) * size + at
    has_rows = tl.load(offsets + expert + 1) > tl.load(offsets + expert)
    sums = wide(tl.load(made + place, at < tl.where(has_rows, size, 0), other=0.0))
    if ADD:
        sums += wide(tl.load(into + place, at < size, other=0.0))
    tl.store(into + place, narrow(sums, into.dtype.element_ty), at < size)


class OnePassSums(MadeBeside):
    """What the product leaves for experts without rows is not said: it is not read."""

    def sums(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor, add: bool) -> None:
        """Written `into` the bucket, or added to it, in the precision of single floats."""
        made = self.product(a, b, offsets)
        assert made.is_contiguous()  # torch pads rows that are no multiple of 16 bytes, which the registry refuses
        size = into[0].numel()
        _put_sums[triton.cdiv(size, _TILE), len(into)](made, offsets, into, size, ADD=add, TILE=_TILE, num_warps=8)


GROUPED = {"expert_linear": expert_products(OnePassSums(by_torch))}
