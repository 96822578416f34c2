"""AdamW's update of a shard in one fused kernel: each element is read once, updated in registers, and written once.

It computes the same as `engine/optim/optimizer.py` in torch, up to the last bits. The factors that all elements share
are in one small vector on the device, so the host needs none of their values.

State in 8 bits and stochastic rounding have the kernel here; all else has the plain one of `adamw.py`.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.triton.bits import flag_nonfinite, wide
from penteract.engine.kernels.triton.optimizer import adamw
from penteract.engine.kernels.triton.optimizer.master_weights import read_master, write_master
from penteract.engine.kernels.triton.optimizer.put_largest import TILE as _OF_ROWS
from penteract.engine.kernels.triton.optimizer.put_largest import place_of, put_largest
from penteract.engine.optim.optimizer import Factors
from penteract.engine.optim.shard_tiles import (
    ROW,
    ROWS,
    TILE,
    FusedUpdate,
    check_dtype,
    random_bits,
    read_moment,
    sizes,
    stored_moment,
    write_moment,
)
from penteract.engine.state.state import Flat


@dataclass(slots=True)
class Update(FusedUpdate):
    """The fused update of shards for AdamW."""

    def __call__(self, flat: Flat, factors: Factors, step: torch.Tensor, nonfinite: torch.Tensor) -> None:
        """Update moments, master weights and parameters in place; none of them if the norm is not finite. `step`: from
        1, [], on the device. `nonfinite` [] becomes NaN if a new master weight is not finite."""
        check_dtype(factors)
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
        slices = self.tables.of(flat)
        largest, first = flat.largest or (None, 0)
        grain = gcd(n, 16)  # elements: lets the compiler use loads of 16 bytes
        _update[(triton.cdiv(n, TILE),)](
            flat.own_gradient, *stored_moment(flat, "mean"), *stored_moment(flat, "square"), flat.master,
            parameter, factors.good, step, nonfinite, slices, largest, first, n // grain, *numbers,
            COUNT=0 if largest is None else len(largest), GRAIN=grain, DECAY=flat.bucket.decay,
            SPLIT=flat.splits_master, **sizes(slices), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _update(
    gradient, mean, mean_scales, mean_levels, mean_midpoints, square, square_scales, square_levels, square_midpoints,
    master, parameter, factors, step, nonfinite, slices, largest, first, grains, gain, epsilon, COUNT: tl.constexpr,
    GRAIN: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """One tile. The shard has `grains` times GRAIN elements. `gain`: weight of the squared gradient (1 - beta2).

    If the norm is not finite, no element is read or written; if it is, all gradients are finite.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0).to(tl.int64) * (ROWS * ROW)
    inner = tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    at, n = tile + inner, tl.where(tl.load(factors) > 0, grains, 0).to(tl.int64) * GRAIN
    here, rows = at < n, row * ROW < n

    g = wide(tl.load(gradient + at, here, other=0.0)) * tl.load(factors + 1)
    m = read_moment(mean, mean_scales, mean_levels, at, row, here, rows)
    v = read_moment(square, square_scales, square_levels, at, row, here, rows)
    m = m + tl.load(factors + 2) * (g - m)
    v = v * tl.load(factors + 3) + gain * (g * g)
    quotient = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.load(factors + 4)) + epsilon)
    write_moment(mean, mean_scales, mean_midpoints, m, at, row, here, rows)
    write_moment(square, square_scales, square_midpoints, v, at, row, here, rows)

    x = read_master(master, parameter, tile, inner, here, "", SPLIT)
    if DECAY:
        x = x * tl.load(factors + 5)
    x = x - quotient * tl.load(factors + 6)
    flag_nonfinite(nonfinite, x, here)
    bits = random_bits(slices, tl.load(step).to(tl.int64), tile, inner, SLICES, GAPS) if SLICES else None
    kept = write_master(master, parameter, tile, inner, here, x, bits, "", SPLIT)
    if COUNT:
        place, before = place_of(largest, first + tile // _OF_ROWS, COUNT)
        put_largest(place, before, kept, here)
