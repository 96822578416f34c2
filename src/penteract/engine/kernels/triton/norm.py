"""RMSNorm of rows, or of each head of them, in one pass: what `engine/kernels/dense.py` says in plain torch.

A program has some groups of C elements, and all of each. The weight's gradient is `PARTS` sums, whatever the card, each
of every so many groups; a second kernel adds them up, so that the result is the same in every run.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import BoundLaunch, bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, in_turn
from penteract.engine.kernels.triton.quantised.fp8_tiles import put_if_larger
from penteract.engine.kernels.triton.quantised.quantise import patterns_of
from penteract.engine.kernels.triton.strides import columns, power_of_two, row_stride, tiles
from penteract.ops.declarations.one_pass import parts
from penteract.ops.tape import Site

_TILE = 4096  # elements of a program, where a group has no more
_THREAD = 16  # elements of a thread
_PLACES = 32  # of a weight whose partial sums one program adds up


@triton.jit
def _tile(x, group, c, row, here, C: tl.constexpr, HEADS: tl.constexpr):
    """Groups of C elements as fp32, HEADS in each row of a tensor; zeros beyond the end."""
    return tl.load(x + _offset(group, c, row, C, HEADS), here, other=0.0).to(tl.float32)


@triton.jit
def _offset(group, c, row, C: tl.constexpr, HEADS: tl.constexpr):
    return ((group // HEADS).to(tl.int64) * row + (group % HEADS) * C)[:, None] + c[None, :]


@triton.jit
def _forward(
    x, other, total, w, y, scale, largest, groups, x_row, other_row, total_row, y_row, epsilon, C: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scale: [groups], of what is normed together. other: None, or what is added to x first; the sum goes to total,
    and is normed as it is there. largest: None, or fp32 [1], for the largest of y and of what was found before."""
    group, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    here = (group < groups)[:, None] & (c < C)[None, :]
    wide = _tile(x, group, c, x_row, here, C, HEADS)
    if other is not None:
        made = (wide + _tile(other, group, c, other_row, here, C, HEADS)).to(total.dtype.element_ty)
        tl.store(total + _offset(group, c, total_row, C, HEADS), made, here)
        wide = made.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) * (1.0 / C)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + epsilon))
    tl.store(scale + group, inverse, group < groups)
    normed = wide * inverse[:, None] * tl.load(w + c, c < C, other=0.0).to(tl.float32)[None, :]
    result = normed.to(y.dtype.element_ty)
    tl.store(y + _offset(group, c, y_row, C, HEADS), result, here)
    if largest is not None:
        patterns = tl.where(here, patterns_of(result.to(tl.float32)), 0)
        put_if_larger(largest, tl.max(tl.max(patterns, axis=1), axis=0))


@triton.jit
def _input(
    x, scale, g, w, out, groups, x_row, g_row, out_row, C: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of x."""
    group, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    here = (group < groups)[:, None] & (c < C)[None, :]
    wide = _tile(x, group, c, x_row, here, C, HEADS)
    slope = _tile(g, group, c, g_row, here, C, HEADS) * tl.load(w + c, c < C, other=0.0).to(tl.float32)[None, :]
    inverse = tl.load(scale + group, group < groups, other=0.0)
    mean = tl.sum(slope * wide, axis=1) * (1.0 / C) * inverse * inverse
    made = (slope - wide * mean[:, None]) * inverse[:, None]
    tl.store(out + _offset(group, c, out_row, C, HEADS), made.to(out.dtype.element_ty), here)


@triton.jit
def _weight(
    x, scale, g, sums, groups, x_row, g_row, C: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums [parts, C] of x·scale·g: of each part, tiles of ROWS groups that are `parts` tiles apart."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, groups, tl.num_programs(0) * ROWS):
        group = first + tl.arange(0, ROWS)
        here = (group < groups)[:, None] & (c < C)[None, :]
        normed = _tile(x, group, c, x_row, here, C, HEADS) * tl.load(scale + group, group < groups, other=0.0)[:, None]
        total += normed * _tile(g, group, c, g_row, here, C, HEADS)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(total, axis=0), c < C)


@triton.jit
def _add_up(sums, into, count, C: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums [count, C] -> their sum over rows, in fp32, written or added."""
    row, c = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < count)[:, None] & (c < C)[None, :]
    total = tl.sum(tl.load(sums + row[:, None] * C + c[None, :], here, other=0.0), axis=0)
    if ADD:
        total += tl.load(into + c, c < C, other=0.0).to(tl.float32)
    tl.store(into + c, total.to(into.dtype.element_ty), c < C)


def _tiles(width: int, groups: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """The grid of programs that have whole groups, and the shape of each."""
    wide = power_of_two(width)
    rows = max(1, _TILE // wide)
    warps = min(16, max(4, rows * wide // (32 * _THREAD)))
    return (tiles(groups, rows),), {"ROWS": rows, "COLUMNS": wide, "num_warps": warps}


@Bindable
def rms_norm(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x [.., n·C], w [C] -> each group of C over its root mean square, times w; keeps 1 / the root, [.., n]. With a
    third out [1]: the largest absolute value of the result."""
    (x,), (w,), (y, scale, *largest) = ins, weights, outs
    width, groups = len(w), scale.numel()
    grid, shape = _tiles(width, groups)
    launch = bind(
        _forward, grid, x, None, None, w, y, scale, *(largest or [None]), groups, row_stride(x), 0, 0, row_stride(y),
        float(site.attrs["epsilon"]), C=width, HEADS=x.shape[-1] // width, **shape,
    )  # fmt: skip
    return after_clearing(largest, launch)


@Bindable
def add_norm(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x, other [.., C], w [C] -> their sum, and what `rms_norm` makes of it."""
    (x, other), (w,), (total, y, scale, *largest) = ins, weights, outs
    width, groups = len(w), scale.numel()
    grid, shape = _tiles(width, groups)
    launch = bind(
        _forward, grid, x, other, total, w, y, scale, *(largest or [None]), groups, row_stride(x), row_stride(other),
        row_stride(total), row_stride(y), float(site.attrs["epsilon"]), C=width, HEADS=1, **shape,
    )  # fmt: skip
    return after_clearing(largest, launch)


def after_clearing(largest: Tensors, launch: Bound) -> Bound:
    """A launch that finds a largest value [1], where there is one: among what it is compared with, nothing is left."""
    return in_turn(*(x.zero_ for x in largest), launch)


@Bindable
def rms_norm_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The gradient of x, from x, the kept scale and g."""
    (x, scale, g), (w,), out = ins, weights, outs[0]
    width, groups = len(w), scale.numel()
    grid, shape = _tiles(width, groups)
    return bind(
        _input, grid, x, scale, g, w, out, groups, row_stride(x), row_stride(g), row_stride(out), C=width,
        HEADS=x.shape[-1] // width, **shape,
    )  # fmt: skip


@Bindable
def rms_norm_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """The sum over groups of x·scale·g, [C]."""
    x, scale, g = ins
    width, groups = len(into[0]), scale.numel()
    count, wide = parts(groups), columns(width)
    room = partial(torch.empty, count, width, dtype=torch.float32, device=x.device)
    each = bind(
        _weight, (count, tiles(width, wide)), x, scale, g, None, groups, row_stride(x), row_stride(g), C=width,
        HEADS=x.shape[-1] // width, ROWS=max(1, _TILE // wide), COLUMNS=wide, num_warps=_TILE // (32 * _THREAD),
    )  # fmt: skip
    added = _added(None, count, into[0], add)

    def run() -> None:
        sums = room()
        each(sums=sums)
        added(sums=sums)

    return run


@Bindable
def put_sum(sums: torch.Tensor, into: torch.Tensor, add: bool) -> Bound:
    """sums [n, C] in fp32 -> their sum over rows, written or added in a fixed order; of no more than some hundred."""
    return _added(sums, len(sums), into, add)


def _added(sums: torch.Tensor | None, count: int, into: torch.Tensor, add: bool) -> BoundLaunch:
    width = len(into)
    return bind(
        _add_up, (tiles(width, _PLACES),), sums, into, count, C=width, ADD=add, ROWS=power_of_two(count),
        COLUMNS=_PLACES, num_warps=8,
    )  # fmt: skip


NORM = {"rms_norm": TorchKernel(rms_norm, rms_norm_input, rms_norm_weight)}
