"""The sum of squares of a step's gradients in one pass over each shard, where a layout asks for Triton's kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from penteract.step.clear_rows import ClearRows
from penteract.step.program import Program
from penteract.step.update import one_pass_norm

_DOT = 2**30  # elements at most of torch's dot product on a GPU, which counts them in 32 bits


class SumOfSquares(Protocol):
    """Sums squares of shards, all in the same order in every step."""

    def add(self, x: torch.Tensor, rows: ClearRows | None = None) -> None:
        """Add the squares of x [n]. `rows`: a table in it, most of which is zero."""
        ...

    def total(self, out: torch.Tensor) -> None:
        """Add the sum over all shards since the last total to out: []."""
        ...


def one_pass_squares(p: Program) -> SumOfSquares | None:
    """Triton's, or None for plain torch. It is imported only for layouts that use it."""
    if not one_pass_norm(p.precision, p.layout.elementwise):
        return None
    from penteract.engine.kernels.triton.optimizer.sum_of_squares import Squares

    return Squares()


def squares(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of x [n], added up in `dtype` by plain torch."""
    if x.dtype != dtype:
        return torch.linalg.vector_norm(x, dtype=dtype).square()
    return torch.stack([part.dot(part) for part in x.split(_DOT)]).sum() if len(x) > _DOT else x.dot(x)
