"""What the kernels of shards share where state is quantised or rounding is stochastic: a tile is four rows of 256
elements, and a row is a block of 8-bit moments."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field

import torch
import triton
import triton.language as tl

from penteract.config.optimizers import Moment
from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.config.run import Optimizer
from penteract.engine.device.launches import BoundLaunch
from penteract.engine.kernels.triton.bits import narrow, wide
from penteract.engine.optim.optimizer import Factors
from penteract.engine.state import moments, stochastic_rounding
from penteract.engine.state.counter_bits import STRIDE, mixed
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.state import Flat

TILE = 4 * MOMENT_BLOCK  # elements of one program: eight for each thread of four warps
_FIXED = 5  # rows of a table of parameter slices before those of the gaps
ROW = tl.constexpr(MOMENT_BLOCK)
ROWS = tl.constexpr(TILE // MOMENT_BLOCK)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FAR = tl.constexpr(2**30)  # elements: more than a tile's, and a sum of two is an int32
_GAP_ROWS = tl.constexpr(_FIXED)  # the first of the rows with gaps
_EPOCH = tl.constexpr(stochastic_rounding.EPOCH)
_LOW = tl.constexpr(2**stochastic_rounding.LOW - 1)


@dataclass(slots=True)
class SliceTables:
    """Tables of parameter slices for stochastic rounding, of shards. They are made when a shard is first updated, so
    that later steps need nothing from the host. So an eager step must come before a captured one."""

    seed: int = 0
    made: dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor] = field(
        default_factory=dict[tuple[tuple[ParameterSlice, ...], int], torch.Tensor], init=False
    )

    def of(self, flat: Flat) -> torch.Tensor | None:
        """The table of a shard; None where it is rounded to nearest."""
        key = flat.parameter_slices, len(flat.master)
        if not flat.parameter_slices:
            return None
        if key not in self.made:
            self.made[key] = table(*key, self.seed).to(flat.master.device)
        return self.made[key]


@dataclass(slots=True)
class FusedUpdate:
    """What an optimizer keeps whose passes over shards are kernels, for updates computed in fp32 only.

    `bound`: launches, by what does not change between shards and steps.
    """

    spec: Optimizer
    seed: InitVar[int] = 0
    tables: SliceTables = field(init=False)
    bound: dict[Hashable, BoundLaunch] = field(default_factory=dict[Hashable, BoundLaunch], init=False)

    def __post_init__(self, seed: int) -> None:
        """Make the tables, which are empty."""
        self.tables = SliceTables(seed)


def check_dtype(factors: Factors) -> None:
    """Raise TypeError unless updates are computed in fp32."""
    if factors.good.dtype != torch.float32:
        raise TypeError(f"the kernel computes updates in float32, not in {factors.good.dtype}")


def sizes(slices: torch.Tensor | None) -> dict[str, int]:
    """What a kernel is compiled for: the columns of a table of parameter slices, and its gaps."""
    rows, columns = (_FIXED, 0) if slices is None else slices.shape
    return {"SLICES": columns, "GAPS": (rows - _FIXED) // 2}


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


def stored_moment(flat: Flat, kind: Moment) -> tuple[torch.Tensor | None, ...]:
    """A moment as it is stored; if it is in 8 bits, with scales, levels and midpoints, else three times None."""
    kept, scales = flat.moments[kind], flat.scales.get(kind)
    if scales is None:
        return kept, None, None, None
    book = moments.codebook(kept.device, signed=kind != "square")
    return kept, scales, book.levels, book.midpoints


@triton.jit
def read_moment(kept, scales, levels, at, row, here, rows):
    """Elements of a moment in fp32."""
    found = tl.load(kept + at, here, other=0)
    if scales is None:
        return wide(found)
    else:
        return tl.load(levels + found.to(tl.int32)) * tl.load(scales + row, rows, other=0.0)[:, None]


@triton.jit
def write_moment(kept, scales, midpoints, x, at, row, here, rows):
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
def random_bits(slices, step, tile, inner, SLICES: tl.constexpr, GAPS: tl.constexpr):
    """`stochastic_rounding.random_bits` of a tile, int32. The few slices with elements in the tile are found by
    comparing all."""
    column = tl.arange(0, SLICES)
    begins = tl.load(slices + column)
    ends = begins + tl.load(slices + SLICES + column)
    first = tl.sum((ends <= tile).to(tl.int32), axis=0)
    last = tl.sum((begins < tile + ROWS * ROW).to(tl.int32), axis=0)
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
