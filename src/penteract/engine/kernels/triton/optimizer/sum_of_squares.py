"""The sum of squares of all gradients, each read once: a kernel for each shard, and one sum at the end.

A fixed number of programs takes the tiles of a shard in turn, and each adds what it finds to its own partial sum. So
the order of every sum hangs on sizes alone, without atomics, and two runs agree to the bit.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import gcd

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import BoundLaunch, bind
from penteract.engine.kernels.triton.bits import wide
from penteract.engine.kernels.triton.optimizer.used_rows import is_used, table
from penteract.engine.kernels.triton.strides import tiles
from penteract.step.clear_rows import ClearRows
from penteract.step.update import PARTIAL_SUMS

TILE, WARPS = 2048, 8  # elements a program reads at a time; eight for each thread


@dataclass(slots=True)
class Squares:
    """Partial sums of the squares of this step's gradients, [PARTIAL_SUMS], from the first shard to the total."""

    partial: torch.Tensor | None = field(default=None, init=False)
    bound: dict[Hashable, BoundLaunch] = field(default_factory=dict[Hashable, BoundLaunch], init=False)

    def add(self, x: torch.Tensor, rows: ClearRows | None = None) -> None:
        """Add the squares of x [n]. `rows`: a table in it, of which rows that are clear are not read."""
        n = len(x)
        if not n:
            return
        if self.partial is None:
            self.partial = torch.zeros(PARTIAL_SUMS, dtype=torch.float32, device=x.device)
        if (n, rows) not in self.bound:
            grain = gcd(n, 16)  # elements: lets the compiler use loads of 16 bytes
            self.bound[n, rows] = bind(
                _add, (min(PARTIAL_SUMS, tiles(n, TILE)),), None, None, n // grain, *table(rows, TILE), TILE=TILE,
                GRAIN=grain, num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        self.bound[n, rows](x=x, partial=self.partial)

    def total(self, out: torch.Tensor) -> None:
        """Add the sum over all shards since the last total to out: []."""
        if self.partial is not None:
            out.add_(self.partial.sum())
        self.partial = None


@triton.jit
def _add(x, partial, grains, begin, end, WIDTH: tl.constexpr, TILE: tl.constexpr, GRAIN: tl.constexpr):
    """Every so many tiles of x, of `grains` times GRAIN elements: the sum of their squares, onto a number of
    `partial`."""
    each: tl.constexpr = TILE // GRAIN
    at, sums = tl.arange(0, TILE), tl.zeros((TILE,), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * each, grains, tl.num_programs(0).to(tl.int64) * each):
        left = tl.minimum(grains - first, each).to(tl.int32)
        if WIDTH:
            left = tl.where(is_used(x, first * GRAIN, begin, end, WIDTH), left, 0)
        found = wide(tl.load(x + first * GRAIN + at, at < left * GRAIN, other=0.0))
        sums += found * found
    mine = partial + tl.program_id(0)
    tl.store(mine, tl.load(mine) + tl.sum(sums, axis=0))
