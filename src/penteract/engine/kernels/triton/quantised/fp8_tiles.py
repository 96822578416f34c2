"""A tile of numbers as FP8 data: the scale of its tensor, and how a tile is written."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.kernels.triton.quantised.quantise import scale_of

ROWS, COLUMNS = 64, 128  # of a tile: lines of 64 bytes at least, whichever way the data lie
WARPS = 8
MOST = tl.constexpr(3.4028234663852886e38)  # in fp32
PROGRAMS = 528  # of kernels that go over all tiles: an H100 or H200 holds as many at once


@triton.jit
def inverse_of(largest, scale, least, limit, POWERS: tl.constexpr):
    """1 / scale [1, 1]. largest: fp32 [1], of which the scale is made, and written; None: it is known."""
    one = tl.zeros((1, 1), tl.int32)
    if largest is None:
        made = tl.load(scale + one)
    else:
        made = scale_of(tl.load(largest + one).to(tl.int32, bitcast=True), least, limit, POWERS)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale + one, made)
    return tl.div_rn(1.0 + tl.zeros_like(made), made)


@triton.jit
def put_larger(largest, pattern):
    """The larger of what is in largest, fp32 [1], and of a number by its pattern, into largest."""
    tl.atomic_max(largest.to(tl.pointer_type(tl.int32), bitcast=True), pattern)


@triton.jit
def put_sampled(largest, pattern, MARGIN: tl.constexpr):
    """The same with a margin above the number, but no more than fp32 has. A NaN stays one."""
    above = tl.minimum(pattern.to(tl.float32, bitcast=True) * MARGIN, MOST, propagate_nan=tl.PropagateNan.ALL)
    put_larger(largest, above.to(tl.int32, bitcast=True))


@triton.jit
def put_if_larger(largest, pattern):
    """The same of many programs: most find a larger number there, and leave it."""
    there = largest.to(tl.pointer_type(tl.int32), bitcast=True)
    if pattern > tl.load(there):
        tl.atomic_max(there, pattern)


@triton.jit
def pattern_at(number):
    """A number's pattern, which has the order of numbers that are not negative, with NaN above all."""
    return tl.load(number.to(tl.pointer_type(tl.int32), bitcast=True))


@triton.jit
def put_above(largest, pattern):
    """A number by its pattern behind the one in largest, fp32 [2], if it is larger than that: few are, so most programs
    only look."""
    if pattern > pattern_at(largest):
        put_larger(largest + 1, pattern)


@triton.jit
def put_tile(tile, inverse, limit, out, inside):
    """Multiply, saturate, round to the nearest FP8 value, ties to even. A NaN stays one."""
    scaled = tile.to(tl.float32) * inverse
    scaled = tl.maximum(scaled, -limit, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out, scaled.to(out.dtype.element_ty), mask=inside)
