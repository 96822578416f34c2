"""Rotary positions in one pass, in place or not: what `engine/kernels/dense.py` says in plain torch.

A program has some tokens and all of their heads. It makes their angles in float64, as shares of a turn, takes whole
turns away, and goes on in fp32: a position of a million is as exact as the first.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.engine.kernels.rotary import turns
from penteract.engine.kernels.triton.strides import power_of_two, row_stride, tiles
from penteract.ops.tape import Site

_TOKENS = 4  # of a program
_TILE = 4096  # elements of either half that it turns at a time: 32 of a thread
_WARPS = 4
_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def cos_and_sin(positions, turns, token, tokens, f, half, length):
    """cos and sin of the angles of some tokens [T, 1, 1], for features f [1, 1, F] of which `half` are there:
    [T, 1, F], times `length`."""
    position = tl.load(positions + token, token < tokens, other=0).to(tl.float64)
    share = position * tl.load(turns + f, f < half, other=0.0)
    angle = (share - tl.floor(share + 0.5)).to(tl.float32) * _TURN
    return tl.cos(angle) * length, tl.sin(angle) * length


@triton.jit
def _rotate(
    x, positions, turns, out, tokens, x_row, out_row, length, SIGN: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, PLAIN: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """HEADS of SIZE features, of which the first PLAIN stay. HALF, REST: powers of two, not less than what half of the
    others, and PLAIN, are."""
    half: tl.constexpr = (SIZE - PLAIN) // 2
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    f = tl.arange(0, HALF)[None, None, :]
    cos, sin = cos_and_sin(positions, turns, token, tokens, f, half, length)
    sin = sin * SIGN
    for first in range(0, HEADS, AT_ONCE):
        head = (first + tl.arange(0, AT_ONCE))[None, :, None]
        found, at = (token < tokens) & (head < HEADS), head * SIZE + PLAIN + f
        here = found & (f < half)
        a = tl.load(x + token * x_row + at, here, other=0.0).to(tl.float32)
        b = tl.load(x + token * x_row + at + half, here, other=0.0).to(tl.float32)
        tl.store(out + token * out_row + at, (a * cos - b * sin).to(out.dtype.element_ty), here)
        tl.store(out + token * out_row + at + half, (b * cos + a * sin).to(out.dtype.element_ty), here)
        if PLAIN:
            still = tl.arange(0, REST)[None, None, :]
            also = found & (still < PLAIN)
            kept = tl.load(x + token * x_row + head * SIZE + still, also, other=0.0)
            tl.store(out + token * out_row + head * SIZE + still, kept, also)


def length_of(site: Site) -> float:
    """What rotated features are multiplied by."""
    scaling = site.attrs["scaling"]
    return 1.0 if scaling is None else float(scaling.attention_factor)


@Bindable
def rotate(site: Site, x: torch.Tensor, positions: torch.Tensor, sign: int, out: torch.Tensor) -> Bound:
    """x [s, B, n·C] rotated by positions [s, B], back with sign -1. `out` may be x."""
    size, plain = int(site.attrs["head_size"]), int(site.attrs["plain_size"])
    heads, half = x.shape[-1] // size, power_of_two((size - plain) // 2)
    at_once = min(power_of_two(heads), max(1, _TILE // (_TOKENS * half)))
    tokens = positions.numel()
    return bind(
        _rotate, (tiles(tokens, _TOKENS),), x, positions, turns(site, x.device), out, tokens, row_stride(x),
        row_stride(out), length_of(site), SIGN=sign, HEADS=heads, SIZE=size, PLAIN=plain,
        TOKENS=_TOKENS, AT_ONCE=at_once, HALF=half, REST=power_of_two(max(1, plain)), num_warps=_WARPS,
    )  # fmt: skip


@Bindable
def rope(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Rotates heads, or a part of each, by position. Su 2021 (2104.09864)."""
    return rotate.bind(site, ins[0], ins[1], 1, outs[0])


@Bindable
def rope_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Rotates the gradient back."""
    return rotate.bind(site, ins[1], ins[0], -1, outs[0])


ROPE = {"rope": TorchKernel(rope, rope_input)}
