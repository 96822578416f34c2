"""AdamW's update of a shard in one fused kernel: each element is read once, updated in registers, and written once.

It computes the same as `engine/optim/optimizer.py` in torch, up to the last bits. The factors that all elements share
are in one small vector on the device, so the host needs none of their values.

State in 8 bits and stochastic rounding have the kernel here; all else has the plain one of `adamw.py`. A tile is four
rows of 256 elements; a row is a block of 8-bit moments.
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

from penteract.config.optimizers import Moment
from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.config.run import Optimizer
from penteract.engine.device.launches import BoundLaunch
from penteract.engine.kernels.triton.bits import flag_nonfinite, halves, joined, narrow, upper, wide
from penteract.engine.kernels.triton.optimizer import adamw
from penteract.engine.kernels.triton.optimizer.put_largest import TILE as _OF_ROWS
from penteract.engine.kernels.triton.optimizer.put_largest import place_of, put_largest
from penteract.engine.optim.optimizer import Factors
from penteract.engine.state import moments, stochastic_rounding
from penteract.engine.state.counter_bits import STRIDE, mixed
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.state import Flat

TILE = 4 * MOMENT_BLOCK  # elements of one program: eight for each thread of four warps
_FIXED = 5  # rows of a table of parameter slices before those of the gaps
_ROW = tl.constexpr(MOMENT_BLOCK)
_ROWS = tl.constexpr(TILE // MOMENT_BLOCK)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FAR = tl.constexpr(2**30)  # elements: more than a tile's, and a sum of two is an int32
_GAP_ROWS = tl.constexpr(_FIXED)  # the first of the rows with gaps
_EPOCH = tl.constexpr(stochastic_rounding.EPOCH)
_LOW = tl.constexpr(2**stochastic_rounding.LOW - 1)


@dataclass(slots=True)
class Update:
    """The fused update of shards for AdamW; for updates computed in fp32 only.

    `tables`: parameter slices, for stochastic rounding. They are made when a shard is first updated, so that later
    steps need nothing from the host. So an eager step must come before a captured one. `bound`: launches, by what does
    not change between shards and steps.
    """

    spec: Optimizer
    seed: int = 0
    tables: dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor] = field(
        default_factory=dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor]
    )
    bound: dict[Hashable, BoundLaunch] = field(default_factory=dict[Hashable, BoundLaunch])

    def __call__(self, flat: Flat, factors: Factors, step: torch.Tensor, nonfinite: torch.Tensor) -> None:
        """Update moments, master weights and parameters in place; none of them if the norm is not finite. `step`: from
        1, [], on the device. `nonfinite` [] becomes NaN if a new master weight is not finite."""
        if factors.good.dtype != torch.float32:
            raise TypeError(f"the kernel computes updates in float32, not in {factors.good.dtype}")
        n, own = len(flat.master), flat.own_parameter
        if not n:
            return
        parameter = own if own.dtype != flat.master.dtype else None
        numbers = (1 - self.spec.betas[1], self.spec.epsilon)
        if not (flat.scales or flat.parameter_slices):
            state = flat.moments["mean"], flat.moments["square"], flat.master, parameter
            adamw.update(
                flat.own_gradient, *state, factors.good, nonfinite, numbers,
                decay=flat.bucket.decay, rows=flat.clear_rows, largest=flat.largest, bound=self.bound,
            )  # fmt: skip
            return
        slices = self._table(flat.parameter_slices, n, flat.master.device) if flat.parameter_slices else None
        largest, first = flat.largest or (None, 0)
        grain = gcd(n, 16)  # elements: lets the compiler use loads of 16 bytes
        _update[(triton.cdiv(n, TILE),)](
            flat.own_gradient, *_moment(flat, "mean"), *_moment(flat, "square"), flat.master,
            parameter, factors.good, step, nonfinite, slices, largest, first, n // grain, *numbers,
            COUNT=0 if largest is None else len(largest), GRAIN=grain, DECAY=flat.bucket.decay,
            SPLIT=flat.splits_master, SLICES=0 if slices is None else slices.shape[1],
            GAPS=0 if slices is None else (slices.shape[0] - _FIXED) // 2, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def _table(self, slices: tuple[ParameterSlice, ...], n: int, device: torch.device) -> torch.Tensor:
        key = (slices, n)
        if key not in self.tables:
            self.tables[key] = table(slices, n, self.seed).to(device)
        return self.tables[key]


def table(slices: tuple[ParameterSlice, ...], n: int, seed: int) -> torch.Tensor:
    """The parameter slices with elements in a shard of n, in order, one a column: int64 [5 + 2·gaps, slices].

    Rows: at, count, begin, origin, start; then (elements of a local row, gap after it) for every dim that is sharded.
    The number of columns is a power of two; unused columns begin after all others.
    """
    inside = sorted((q for q in slices if q.at < n and q.at + q.count > 0), key=lambda q: q.at)
    gaps = max((len(q.gaps) for q in inside), default=0)
    unused = torch.tensor([2**62, 0, 0, 0, 0, *([1, 0] * gaps)])
    out = unused[:, None].repeat(1, triton.next_power_of_2(max(1, len(inside))))
    for i, q in enumerate(inside):
        numbers = [q.at, q.count, q.begin, q.origin, q.start(seed, "rounding"), *(x for gap in q.gaps for x in gap)]
        out[: len(numbers), i] = torch.tensor(numbers)
    return out


def _moment(flat: Flat, kind: Moment) -> tuple[torch.Tensor | None, ...]:
    """A moment as it is stored; if it is in 8 bits, with scales, levels and midpoints, else three times None."""
    kept, scales = flat.moments[kind], flat.scales.get(kind)
    if scales is None:
        return kept, None, None, None
    book = moments.codebook(kept.device, signed=kind != "square")
    return kept, scales, book.levels, book.midpoints


@triton.jit
def _update(
    gradient, mean, mean_scales, mean_levels, mean_midpoints, square, square_scales, square_levels, square_midpoints,
    master, parameter, factors, step, nonfinite, slices, largest, first, grains, gain, epsilon, COUNT: tl.constexpr,
    GRAIN: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """One tile. The shard has `grains` times GRAIN elements. `gain`: weight of the squared gradient (1 - beta2).

    If the norm is not finite, no element is read or written; if it is, all gradients are finite.
    """
    row = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    tile = tl.program_id(0).to(tl.int64) * (_ROWS * _ROW)
    inner = tl.arange(0, _ROWS)[:, None] * _ROW + tl.arange(0, _ROW)[None, :]
    at, n = tile + inner, tl.where(tl.load(factors) > 0, grains, 0).to(tl.int64) * GRAIN
    here, rows = at < n, row * _ROW < n

    g = wide(tl.load(gradient + at, here, other=0.0)) * tl.load(factors + 1)
    m = _read(mean, mean_scales, mean_levels, at, row, here, rows)
    v = _read(square, square_scales, square_levels, at, row, here, rows)
    m = m + tl.load(factors + 2) * (g - m)
    v = v * tl.load(factors + 3) + gain * (g * g)
    quotient = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.load(factors + 4)) + epsilon)
    _write(mean, mean_scales, mean_midpoints, m, at, row, here, rows)
    _write(square, square_scales, square_midpoints, v, at, row, here, rows)

    x = tl.load(master + at, here, other=0)
    x = joined(tl.load(parameter + at, here, other=0.0), x) if SPLIT else wide(x)
    if DECAY:
        x = x * tl.load(factors + 5)
    x = x - quotient * tl.load(factors + 6)
    flag_nonfinite(nonfinite, x, here)
    if SPLIT:
        kept, low = halves(x)
        tl.store(master + at, low, here)
        tl.store(parameter + at, kept, here)
    elif SLICES:
        bits = _random_bits(slices, tl.load(step).to(tl.int64), tile, inner, SLICES, GAPS)
        kept = upper(x.to(tl.int32, bitcast=True) + bits)
        tl.store(master + at, kept, here)
    else:
        kept = narrow(x, master.dtype.element_ty)
        tl.store(master + at, kept, here)
    if not SPLIT and parameter is not None:
        kept = narrow(x, parameter.dtype.element_ty)
        tl.store(parameter + at, kept, here)
    if COUNT:
        place, before = place_of(largest, first + tile // _OF_ROWS, COUNT)
        put_largest(place, before, kept, here)


@triton.jit
def _read(kept, scales, levels, at, row, here, rows):
    """Elements of a moment in fp32."""
    found = tl.load(kept + at, here, other=0)
    if scales is None:
        return wide(found)
    else:
        return tl.load(levels + found.to(tl.int32)) * tl.load(scales + row, rows, other=0.0)[:, None]


@triton.jit
def _write(kept, scales, midpoints, x, at, row, here, rows):
    """Write elements of a moment, rounded. 8-bit indices of a codebook: a binary search of eight steps."""
    if scales is None:
        tl.store(kept + at, narrow(x, kept.dtype.element_ty), here)
    else:
        largest = tl.max(tl.abs(x), axis=1)
        tl.store(scales + row, largest, rows)
        x = tl.div_rn(x, tl.maximum(largest, _TINY)[:, None])
        index = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(8):
            index += tl.where(tl.load(midpoints + index + ((128 >> i) - 1)) < x, 128 >> i, 0)
        tl.store(kept + at, index.to(tl.uint8), here)


@triton.jit
def _random_bits(slices, step, tile, inner, SLICES: tl.constexpr, GAPS: tl.constexpr):
    """`stochastic_rounding.random_bits` of a tile, int32. The few slices with elements in the tile are found by
    comparing all."""
    column = tl.arange(0, SLICES)
    begins = tl.load(slices + column)
    ends = begins + tl.load(slices + SLICES + column)
    first = tl.sum((ends <= tile).to(tl.int32), axis=0)
    last = tl.sum((begins < tile + _ROWS * _ROW).to(tl.int32), axis=0)
    z = tl.zeros(inner.shape, tl.int64)
    while first < last:
        entry = slices + first
        at, count, begin = tl.load(entry), tl.load(entry + SLICES), tl.load(entry + 2 * SLICES)
        start = tl.maximum(at, tile)
        offset = inner - (start - tile).to(tl.int32)
        own = (offset >= 0) & (offset < tl.minimum(at + count - start, _FAR).to(tl.int32))
        span = begin + start - at
        base, distance = tl.load(entry + 3 * SLICES) + span, offset.to(tl.int64)
        for g in tl.static_range(GAPS):
            length = tl.load(entry + (_GAP_ROWS + 2 * g) * SLICES)
            gap = tl.load(entry + (_GAP_ROWS + 2 * g + 1) * SLICES)
            before = span // length
            base += before * gap
            past = offset - tl.minimum(length - (span - before * length), _FAR).to(tl.int32)  # the first row's end
            rows = tl.where(past < 0, 0, 1 + past // tl.minimum(length, _FAR).to(tl.int32))
            distance += rows.to(tl.int64) * gap
        start_value = (base + step * _EPOCH) * STRIDE + tl.load(entry + 4 * SLICES)
        z = tl.where(own, start_value + distance * STRIDE, z)
        first += 1
    return (mixed(z) & _LOW).to(tl.int32)
