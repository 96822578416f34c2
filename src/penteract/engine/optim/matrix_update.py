"""The two passes of Muon over a shard, before and after its matrices are made orthogonal, each in one fused kernel: an
element is read once, updated in registers, and written once.

They compute the same as `engine/optim/muon.py` in torch, bit for bit: where torch contracts a product and a sum into
one rounding, in its interpolation, so do they, and nowhere else.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Hashable
from ctypes import c_float
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.triton.bits import flag_nonfinite, multiply_add, narrow, wide
from penteract.engine.kernels.triton.optimizer.adamw import AT_ONCE
from penteract.engine.kernels.triton.optimizer.master_weights import read_master, write_master
from penteract.engine.kernels.triton.strides import tiles
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

_TILE = tl.constexpr(TILE)


@dataclass(slots=True)
class MatrixUpdate(FusedUpdate):
    """The fused passes of shards for Muon."""

    def update_momentum(self, flat: Flat, into: torch.Tensor, factors: Factors) -> None:
        """Update the momentum, unless the norm is not finite; the values to orthogonalise go `into` [n]."""
        check_dtype(factors)
        weight, nesterov = self.spec.muon_momentum, self.spec.muon_nesterov
        kept, scales, levels, midpoints = stored_moment(flat, "momentum")
        self._launch(
            _update_momentum, len(into), scales is None,
            {"gain": c_float(1 - weight).value, "weight": c_float(weight).value, "NESTEROV": nesterov},
            gradient=flat.own_gradient, kept=kept, scales=scales, levels=levels, midpoints=midpoints, into=into,
            factors=factors.good,
        )  # fmt: skip

    def apply(
        self, flat: Flat, direction: torch.Tensor, factors: Factors, rate: torch.Tensor, step: torch.Tensor,
        nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """Apply weight decay and one step along `direction` [n] to master weights and parameters, unless the norm is
        not finite. `rate`, `step`: [], on the device. `nonfinite` [] becomes NaN if a new master weight is not
        finite."""
        own, slices = flat.own_parameter, self.tables.of(flat)
        about = {"DECAY": flat.bucket.decay, "SPLIT": flat.splits_master, **sizes(slices)}
        self._launch(
            _apply, len(direction), tuple(about.values()), about,
            direction=direction, master=flat.master, parameter=own if own.dtype != flat.master.dtype else None,
            factors=factors.good, rate=rate, step=step, nonfinite=nonfinite, slices=slices,
        )  # fmt: skip

    def _launch(
        self, kernel: Any, n: int, key: Hashable, fixed: dict[str, Any], **tensors: torch.Tensor | None
    ) -> None:
        if not n:
            return
        if (key := (kernel, n, key)) not in self.bound:
            grain = gcd(n, 16)  # elements: lets the compiler use loads of 16 bytes
            self.bound[key] = bind(
                kernel, (tiles(n, TILE),), **dict.fromkeys(tensors), grains=n // grain, **fixed, GRAIN=grain,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        self.bound[key](**tensors)


@triton.jit
def _update_momentum(
    gradient, kept, scales, levels, midpoints, into, factors, grains, gain, weight, NESTEROV: tl.constexpr,
    GRAIN: tl.constexpr,
):  # fmt: skip
    """One tile of a shard of `grains` times GRAIN elements. `weight`: of the old momentum; `gain`: of the gradient."""
    tile = tl.program_id(0)
    # In grains, so that the compiler sees that the number of elements is a multiple of GRAIN.
    left = tl.minimum(grains - tile.to(tl.int64) * (_TILE // GRAIN), _TILE // GRAIN).to(tl.int32)
    start, row = tile.to(tl.int64) * _TILE, tl.arange(0, ROWS)
    if scales is None:
        at = tl.max_contiguous(tl.arange(0, _TILE), AT_ONCE)
    else:
        at = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
        scales += tile.to(tl.int64) * ROWS
    here, rows = at < left * GRAIN, row * ROW < left * GRAIN
    g = wide(tl.load(gradient + start + at, here, other=0.0))
    m = read_moment(kept + start, scales, levels, at, row, here, rows)
    good = tl.load(factors)

    g = tl.where(good > 0, g * tl.load(factors + 1), 0.0)
    m = _between(m, g, good * gain)
    found = _between(g, m, weight) if NESTEROV else m
    tl.store(into + start + at, narrow(found, into.dtype.element_ty), here)
    left = tl.where(good > 0, left, 0)
    write_moment(kept + start, scales, midpoints, m, at, row, at < left * GRAIN, row * ROW < left * GRAIN)


@triton.jit
def _between(x, y, weight):
    """`torch.lerp`: x + weight·(y - x), from the end that is nearer, with one rounding of the product and the sum."""
    near = tl.abs(weight) < 0.5
    return multiply_add(tl.where(near, weight, weight - 1.0), y - x, tl.where(near, x, y))


@triton.jit
def _apply(
    direction, master, parameter, factors, rate, step, nonfinite, slices, grains, DECAY: tl.constexpr,
    SPLIT: tl.constexpr, SLICES: tl.constexpr, GAPS: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """One tile of a shard of `grains` times GRAIN elements. If the norm is not finite, nothing is written."""
    tile = tl.program_id(0)
    left = tl.minimum(grains - tile.to(tl.int64) * (_TILE // GRAIN), _TILE // GRAIN).to(tl.int32)
    at, start = tl.max_contiguous(tl.arange(0, _TILE), AT_ONCE), tile.to(tl.int64) * _TILE
    here = at < left * GRAIN
    found = wide(tl.load(direction + start + at, here, other=0.0))
    x = read_master(master, parameter, start, at, here, "", SPLIT)
    good = tl.load(factors)

    if DECAY:
        x = x * tl.load(factors + 5)
    x = x - found * (good * tl.load(rate).to(tl.float32))
    here = at < tl.where(good > 0, left, 0) * GRAIN
    flag_nonfinite(nonfinite, x, here)
    bits = random_bits(slices, tl.load(step).to(tl.int64), start, at, SLICES, GAPS) if SLICES else None
    write_master(master, parameter, start, at, here, x, bits, "", SPLIT)
