"""AdamW's step of a shard in one pass: each element is read once, moved in registers, and written once.

What `engine/optim/optimizer.py` says with torch, but for last bits: divisions and roots are IEEE's, products and sums
are not fused. Numbers that are alike for all elements come in one small vector, so the host knows none of them.

A tile is some rows of 256 elements: blocks of moments in 8 bits, where they are.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import torch
import triton
import triton.language as tl

from penteract.config.optimizers import Moment
from penteract.config.precision.policy import BLOCK
from penteract.config.run import Optimizer
from penteract.engine.executor.state import Flat
from penteract.engine.optim import moments, stochastic_rounding
from penteract.engine.optim.optimizer import Factors
from penteract.engine.optim.stochastic_rounding import ParameterSlice

TILE = 4 * BLOCK  # elements of one program: eight for each thread of four warps
_FIXED = 5  # columns of a table of places before those of its gaps
_ROW = tl.constexpr(BLOCK)
_ROWS = tl.constexpr(TILE // BLOCK)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FAR = tl.constexpr(2**30)  # elements: more than a tile's, and a sum of two is an int32
_COLUMNS = tl.constexpr(_FIXED)
_STRIDE = tl.constexpr(stochastic_rounding.STRIDE)
_EPOCH = tl.constexpr(stochastic_rounding.EPOCH)
_LOW = tl.constexpr(2**stochastic_rounding.LOW - 1)
(_SHIFT0, _MIX0), (_SHIFT1, _MIX1), (_SHIFT2, _) = (
    (tl.constexpr(shift), tl.constexpr(factor % 2**64)) for shift, factor in stochastic_rounding.MIXES
)


@dataclass(slots=True)
class Update:
    """Moves shards for an AdamW; of updates computed in fp32 alone.

    `tables`: of places, made when a shard is first moved, so that later steps ask nothing of the host; a step that is
    captured comes after one that is not.
    """

    spec: Optimizer
    seed: int = 0
    tables: dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor] = field(
        default_factory=dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor]
    )

    def __call__(self, flat: Flat, factors: Factors, step: torch.Tensor) -> None:
        """Averages, master and parameter in place; nothing of them where the norm is not finite."""
        if factors.good.dtype != torch.float32:
            raise TypeError(f"the kernel computes updates in float32, not in {factors.good.dtype}")
        n, own = len(flat.master), flat.own_parameter
        if not n:
            return
        places = self._table(flat.parameter_slices, n, flat.master.device) if flat.parameter_slices else None
        grain = gcd(n, 16)  # elements: as loads of 16 bytes want to know
        _move[(triton.cdiv(n, TILE),)](
            flat.own_gradient, *_average(flat, "mean"), *_average(flat, "square"), flat.master,
            own if own.dtype != flat.master.dtype else None, factors.good, step, places,
            n // grain, 1 - self.spec.betas[1], self.spec.epsilon,
            GRAIN=grain, DECAY=flat.bucket.decay, PLACES=0 if places is None else places.shape[1],
            GAPS=0 if places is None else (places.shape[0] - _FIXED) // 2, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def _table(self, places: tuple[ParameterSlice, ...], n: int, device: torch.device) -> torch.Tensor:
        key = (places, n)
        if key not in self.tables:
            self.tables[key] = table(places, n, self.seed).to(device)
        return self.tables[key]


def table(places: tuple[ParameterSlice, ...], n: int, seed: int) -> torch.Tensor:
    """What is to know of the places with any of a shard's n elements, in their order: int64 [5 + 2·gaps, places].

    Rows: at, count, begin, origin, digest; then a row's elements and the gap after it, for every dim that is cut. As
    many columns as a power of two; those of no place begin after all others.
    """
    here = sorted((q for q in places if q.at < n and q.at + q.count > 0), key=lambda q: q.at)
    gaps = max((len(q.gaps) for q in here), default=0)
    filled = torch.tensor([2**62, 0, 0, 0, 0, *([1, 0] * gaps)])
    out = filled[:, None].repeat(1, triton.next_power_of_2(max(1, len(here))))
    for i, q in enumerate(here):
        numbers = [q.at, q.count, q.begin, q.origin, q.digest(seed), *(x for gap in q.gaps for x in gap)]
        out[: len(numbers), i] = torch.tensor(numbers)
    return out


def _average(flat: Flat, kind: Moment) -> tuple[torch.Tensor | None, ...]:
    """What is kept, and of codes their scales, levels and borders."""
    kept, scales = flat.moments[kind], flat.scales.get(kind)
    if scales is None:
        return kept, None, None, None
    code = moments.code(kept.device, signed=kind != "square")
    return kept, scales, code.levels, code.borders


@triton.jit
def _move(
    gradient, mean, mean_scales, mean_levels, mean_borders, square, square_scales, square_levels, square_borders,
    master, parameter, factors, step, places, grains, gain, epsilon,
    GRAIN: tl.constexpr, DECAY: tl.constexpr, PLACES: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """One tile. `grains` of GRAIN elements are the shard. `gain`: the square's weight in the second average.

    Where the norm is not finite, no element is read or written; where it is, so are all gradients.
    """
    row = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    tile = tl.program_id(0).to(tl.int64) * (_ROWS * _ROW)
    inner = tl.arange(0, _ROWS)[:, None] * _ROW + tl.arange(0, _ROW)[None, :]
    at, n = tile + inner, tl.where(tl.load(factors) > 0, grains, 0).to(tl.int64) * GRAIN
    here, rows = at < n, row * _ROW < n

    g = _wide(tl.load(gradient + at, here, other=0.0)) * tl.load(factors + 1)
    m = _read(mean, mean_scales, mean_levels, at, row, here, rows)
    v = _read(square, square_scales, square_levels, at, row, here, rows)
    m = m + tl.load(factors + 2) * (g - m)
    v = v * tl.load(factors + 3) + gain * (g * g)
    quotient = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.load(factors + 4)) + epsilon)
    _write(mean, mean_scales, mean_borders, m, at, row, here, rows)
    _write(square, square_scales, square_borders, v, at, row, here, rows)

    x = _wide(tl.load(master + at, here, other=0.0))
    if DECAY:
        x = x * tl.load(factors + 5)
    x = x - quotient * tl.load(factors + 6)
    if PLACES:
        bits = _chances(places, tl.load(step).to(tl.int64), tile, inner, PLACES, GAPS)
        tl.store(master + at, _upper(x.to(tl.int32, bitcast=True) + bits), here)
    else:
        tl.store(master + at, _narrow(x, master.dtype.element_ty), here)
    if parameter is not None:
        tl.store(parameter + at, _narrow(x, parameter.dtype.element_ty), here)


@triton.jit
def _read(kept, scales, levels, at, row, here, rows):
    """Averages in fp32."""
    found = tl.load(kept + at, here, other=0)
    if scales is None:
        return _wide(found)
    else:
        return tl.load(levels + found.to(tl.int32)) * tl.load(scales + row, rows, other=0.0)[:, None]


@triton.jit
def _write(kept, scales, borders, x, at, row, here, rows):
    """Rounded; to codes by a search of as many steps as a code has bits."""
    if scales is None:
        tl.store(kept + at, _narrow(x, kept.dtype.element_ty), here)
    else:
        largest = tl.max(tl.abs(x), axis=1)
        tl.store(scales + row, largest, rows)
        x = tl.div_rn(x, tl.maximum(largest, _TINY)[:, None])
        code = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(8):
            code += tl.where(tl.load(borders + code + ((128 >> i) - 1)) < x, 128 >> i, 0)
        tl.store(kept + at, code.to(tl.uint8), here)


@triton.jit
def _wide(x):
    """As fp32; of bf16 by its bits, so that the smallest numbers are not lost in Triton's interpreter."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """fp32 to the nearest of another dtype, ties to even; of bf16 by its bits, as the interpreter takes ties away."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = tl.where(x == x, bits + (0x7FFF + ((bits >> 16) & 1)), 0x7FC00000)
        return _upper(nearest)
    else:
        return x.to(dtype)


@triton.jit
def _upper(bits):
    """The upper half of fp32's bits, as bf16."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _chances(places, step, tile, inner, PLACES: tl.constexpr, GAPS: tl.constexpr):
    """`stochastic_rounding.chances` of a tile, int32. Few places have elements in it: those are found by comparing
    all."""
    which = tl.arange(0, PLACES)
    begins = tl.load(places + which)
    ends = begins + tl.load(places + PLACES + which)
    first = tl.sum((ends <= tile).to(tl.int32), axis=0)
    last = tl.sum((begins < tile + _ROWS * _ROW).to(tl.int32), axis=0)
    z = tl.zeros(inner.shape, tl.int64)
    while first < last:
        place = places + first
        at, count, begin = tl.load(place), tl.load(place + PLACES), tl.load(place + 2 * PLACES)
        start = tl.maximum(at, tile)
        offset = inner - (start - tile).to(tl.int32)
        own = (offset >= 0) & (offset < tl.minimum(at + count - start, _FAR).to(tl.int32))
        span = begin + start - at
        base, beyond = tl.load(place + 3 * PLACES) + span, offset.to(tl.int64)
        for g in tl.static_range(GAPS):
            length = tl.load(place + (_COLUMNS + 2 * g) * PLACES)
            gap = tl.load(place + (_COLUMNS + 2 * g + 1) * PLACES)
            before = span // length
            base += before * gap
            past = offset - tl.minimum(length - (span - before * length), _FAR).to(tl.int32)  # of the row it begins in
            more = tl.where(past < 0, 0, 1 + past // tl.minimum(length, _FAR).to(tl.int32))
            beyond += more.to(tl.int64) * gap
        first_of = (base + step * _EPOCH) * _STRIDE + tl.load(place + 4 * PLACES)
        z = tl.where(own, first_of + beyond * _STRIDE, z)
        first += 1
    u = z.to(tl.uint64, bitcast=True)
    u = (u ^ (u >> _SHIFT0)) * _MIX0
    u = (u ^ (u >> _SHIFT1)) * _MIX1
    return ((u ^ (u >> _SHIFT2)) & _LOW).to(tl.int32)
