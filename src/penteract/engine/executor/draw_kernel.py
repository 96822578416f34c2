"""Initial weights in one kernel: `initial_weights.py` makes the same bits in some thirty passes of torch, which take
seconds of a start."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.triton.strides import tiles
from penteract.engine.state.counter_bits import STRIDE, mixed
from penteract.engine.state.counter_random import ParameterSlice

TILE, WARPS = 1024, 4
GAPS = 2  # of a slice, at most
_NUMBERS = ("n", "first", "origin", "start", "row0", "gap0", "row1", "gap1")


def draw(
    out: torch.Tensor, whole: ParameterSlice, first: int, start: int, scale: float, middles: torch.Tensor,
    steps: torch.Tensor, place: int,
) -> None:  # fmt: skip
    """Normal numbers of deviation `scale` into out, fp32 [n]: elements from `first` on of a parameter's rectangle.
    `start`: of its random sequence; `middles`, `steps`: of the table of quantiles; `place`: the first of the bits that
    tell a number's place in its cell. `whole.gaps` may be GAPS at most."""
    assert whole.at == whole.begin, "the slice is a whole rectangle"
    gaps = [*whole.gaps, (1, 0), (1, 0)][:GAPS]
    numbers: Any = (len(out), first, whole.origin, start, *gaps[0], *gaps[1])
    _draw[(tiles(len(out), TILE),)](
        out, middles, steps, scale, *numbers, CELLS=len(middles), PLACE=place, COUNT=len(whole.gaps), TILE=TILE,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _draw(
    out, middles, steps, scale, n: tl.int64, first: tl.int64, origin: tl.int64, start: tl.int64, row0: tl.int64,
    gap0: tl.int64, row1: tl.int64, gap1: tl.int64, CELLS: tl.constexpr, PLACE: tl.constexpr, COUNT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = at + first
    index = place + origin
    if COUNT > 0:
        index += place // row0 * gap0
    if COUNT > 1:
        index += place // row1 * gap1
    bits = mixed(index * STRIDE + start).to(tl.int64, bitcast=True)
    cell = (bits & (CELLS - 1)).to(tl.int32)
    x = (bits >> PLACE).to(tl.float32) * tl.load(steps + cell)
    tl.store(out + at, (x + tl.load(middles + cell)) * scale, at < n)
