"""AdamW's update of a shard whose state is not quantised: one pass at the speed of memory.

What keeps it there, each seen in the machine code for sm_90:

- All loads come before any other work, so that one wait covers them. A store before a load would hold the load back.
- A thread has four neighbours of every operand, also of those in 16 bits: `AT_ONCE`. So nothing goes through shared
  memory to change hands, and a warp reads and writes whole lines.
- Offsets in a tile are int32, and masks hold for `GRAIN` elements at once: accesses are of 16 bytes (8 in 16 bits).
- The division and the root are the device's fast ones, within two units of the last place, without branches. `exact`
  asks for IEEE's.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import BoundLaunch, bind
from penteract.engine.kernels.quantised.largest_rows import LargestRows
from penteract.engine.kernels.triton.bits import flag_nonfinite, narrow, wide
from penteract.engine.kernels.triton.optimizer.master_weights import read_master, write_master
from penteract.engine.kernels.triton.optimizer.put_largest import TILE as _OF_ROWS
from penteract.engine.kernels.triton.optimizer.put_largest import place_of, put_largest
from penteract.engine.kernels.triton.optimizer.used_rows import is_used, table
from penteract.engine.kernels.triton.strides import tiles
from penteract.parallel.known_weights import TILE
from penteract.step.clear_rows import ClearRows

AT_ONCE = tl.constexpr(4)  # elements: 16 bytes of fp32


@dataclass(frozen=True, slots=True)
class UpdateForm:
    """How the kernel is compiled.

    tile    elements of a program, a power of two
    warps   of a program
    exact   IEEE's division and root, in place of fast ones
    fused   the compiler may contract a product and a sum into one rounding
    stream  what is read and written is the first to leave the L2 cache
    """

    tile: int = 1024
    warps: int = 4
    exact: bool = False
    fused: bool = True
    stream: bool = False


FORM = UpdateForm()  # the one that runs: benchmarks/update_kernel.py compares


def update(
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    factors: torch.Tensor,
    nonfinite: torch.Tensor,
    numbers: tuple[float, float],
    *,
    decay: bool,
    rows: ClearRows | None = None,
    form: UpdateForm = FORM,
    largest: LargestRows | None = None,
    bound: dict[Hashable, BoundLaunch] | None = None,
) -> None:
    """Update all but the gradient in place, [n] each; `parameter`: rounded from the master weights, if it is separate.
    `master` in int16: the other half of those weights whose upper half is `parameter`.

    `factors`: `Factors` as one vector, fp32. `nonfinite` [] becomes NaN if a new master weight is not finite.
    `numbers`: the weight of the squared gradient (1 - beta2), epsilon. `rows`: a table in the shard; rows of its
    gradient that are clear are not read. `largest`: where the largest absolute values of new parameters go, if they are
    more than what is there. `bound`: launches of earlier updates of such shards, kept by the caller.
    """
    n, splits = len(master), master.dtype == torch.int16
    bound = {} if bound is None else bound
    found, first = (None, 0) if largest is None else largest
    if found is not None and form.tile > TILE:
        raise ValueError(f"a tile of {form.tile} elements may be of two weights")
    count = 0 if found is None else len(found)
    key = n, splits, numbers, decay, rows, count, form
    if key not in bound:
        grain = gcd(n, 16)
        bound[key] = bind(
            _update, (tiles(n, form.tile),), *[None] * 9, n // grain, *numbers, *table(rows, form.tile), TILE=form.tile,
            COUNT=count, GRAIN=grain, DECAY=decay, SPLIT=splits, EXACT=form.exact, STREAM=form.stream,
            num_warps=form.warps, enable_fp_fusion=form.fused,
        )  # fmt: skip
    bound[key](
        gradient=gradient, mean=mean, square=square, master=master, parameter=parameter, factors=factors,
        nonfinite=nonfinite, largest=found, first=first,
    )  # fmt: skip


@triton.jit
def _update(
    gradient, mean, square, master, parameter, factors, nonfinite, largest, first, grains, gain, epsilon, begin, end,
    WIDTH: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr, GRAIN: tl.constexpr, DECAY: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """One tile of a shard of `grains` times GRAIN elements. If the norm is not finite, nothing is written."""
    policy: tl.constexpr = "evict_first" if STREAM else ""  # pyright: ignore[reportAssignmentType]
    tile = tl.program_id(0)
    # In grains, so that the compiler sees that the number of elements is a multiple of GRAIN.
    left = tl.minimum(grains - tile.to(tl.int64) * (TILE // GRAIN), TILE // GRAIN).to(tl.int32)
    at = tl.max_contiguous(tl.arange(0, TILE), AT_ONCE)
    here, start = at < left * GRAIN, tile.to(tl.int64) * TILE
    if WIDTH:  # what tells whether to read the gradient comes before all, the gradient after all
        read = tl.where(is_used(gradient, start, begin, end, WIDTH), left, 0)
    else:
        g = wide(tl.load(gradient + start + at, here, other=0.0, eviction_policy=policy))
    m = wide(tl.load(mean + start + at, here, other=0.0, eviction_policy=policy))
    v = wide(tl.load(square + start + at, here, other=0.0, eviction_policy=policy))
    x = read_master(master, parameter, start, at, here, policy, SPLIT)
    if WIDTH:
        g = wide(tl.load(gradient + start + at, at < read * GRAIN, other=0.0, eviction_policy=policy))
    good = tl.load(factors) > 0
    if COUNT:
        place, before = place_of(largest, first + start // _OF_ROWS, COUNT)

    g = g * tl.load(factors + 1)
    m = m + tl.load(factors + 2) * (g - m)
    v = v * tl.load(factors + 3) + gain * (g * g)
    root = tl.load(factors + 4)
    if EXACT:
        quotient = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + epsilon)
    else:
        quotient = m / (tl.sqrt(v) * (1.0 / root) + epsilon)
    if DECAY:
        x = x * tl.load(factors + 5)
    x = x - quotient * tl.load(factors + 6)

    here = at < tl.where(good, left, 0) * GRAIN
    flag_nonfinite(nonfinite, x, here)
    tl.store(mean + start + at, narrow(m, mean.dtype.element_ty), here, eviction_policy=policy)
    tl.store(square + start + at, narrow(v, square.dtype.element_ty), here, eviction_policy=policy)
    kept = write_master(master, parameter, start, at, here, x, None, policy, SPLIT)
    if COUNT:
        put_largest(place, before, kept, here)
