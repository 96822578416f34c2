"""Query and key heads between a packed product and attention, in one pass each way: RMSNorm of each head, then rotary
positions; in backward both are taken out of the gradient in place, with partial sums of the weights' gradients.

A program has some tokens and goes over their heads, some at a time, in fp32. In backward program p of `PARTS` takes
every so many groups of tokens and keeps its sums in registers, so there are no atomics, and results do not depend on
how many processors a card has.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, in_turn
from penteract.engine.kernels.rotary import turns
from penteract.engine.kernels.triton.norm import put_sum
from penteract.engine.kernels.triton.rotary import cos_and_sin, length_of
from penteract.engine.kernels.triton.strides import power_of_two, row_stride, tiles
from penteract.ops.declarations.fusions import PARTS
from penteract.ops.tape import Site

_TOKENS = 4  # of a program at a time
_TILE = 2048  # elements of either half of heads that a program has at a time: 16 of a thread
_BACK = 1024  # the same in backward, which reads twice as many and keeps sums
_WARPS = 4


@triton.jit
def _halves(x, at, here, half: tl.constexpr):
    """Both halves of heads as fp32; zeros where there is nothing."""
    return tl.load(x + at, here, other=0.0).to(tl.float32), tl.load(x + at + half, here, other=0.0).to(tl.float32)


@triton.jit
def _put_some(
    x, w, out, scales, token, tokens, cos, sin, f, x_row, out_row, scale_row, epsilon, FIRST: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """HEADS heads from FIRST on, of some tokens."""
    half: tl.constexpr = SIZE // 2
    w_a, w_b = _halves(w, f, f < half, half)
    for first in range(0, HEADS, AT_ONCE):
        head = (first + tl.arange(0, AT_ONCE))[None, :, None]
        found = (token < tokens) & (head < HEADS)
        here, at = found & (f < half), (FIRST + head) * SIZE + f
        a, b = _halves(x, token * x_row + at, here, half)
        mean = tl.sum(a * a + b * b, axis=2, keep_dims=True) * (1.0 / SIZE)
        inverse = tl.div_rn(tl.full((TOKENS, AT_ONCE, 1), 1.0, tl.float32), tl.sqrt_rn(mean + epsilon))
        tl.store(scales + token * scale_row + FIRST + head, inverse, found)
        a, b = a * inverse * w_a, b * inverse * w_b
        tl.store(out + token * out_row + at, (a * cos - b * sin).to(out.dtype.element_ty), here)
        tl.store(out + token * out_row + at + half, (b * cos + a * sin).to(out.dtype.element_ty), here)


@triton.jit
def _put(
    x, positions, turns, of_query, of_key, out, scales, tokens, x_row, out_row, scale_row, length, epsilon,
    QUERY: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERY_AT_ONCE: tl.constexpr,
    KEY_AT_ONCE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    f = tl.arange(0, HALF)[None, None, :]
    cos, sin = cos_and_sin(positions, turns, token, tokens, f, SIZE // 2, length)
    _put_some(x, of_query, out, scales, token, tokens, cos, sin, f, x_row, out_row, scale_row, epsilon,
              0, QUERY, SIZE, QUERY_AT_ONCE, TOKENS)  # fmt: skip
    _put_some(x, of_key, out, scales, token, tokens, cos, sin, f, x_row, out_row, scale_row, epsilon,
              QUERY, KEY, SIZE, KEY_AT_ONCE, TOKENS)  # fmt: skip


@triton.jit
def _back_some(
    x, w, g, scales, total_a, total_b, token, tokens, cos, sin, f, x_row, g_row, scale_row, FIRST: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Gradients of HEADS heads from FIRST on, in place; -> the sums so far of those of the weight's halves."""
    half: tl.constexpr = SIZE // 2
    w_a, w_b = _halves(w, f, f < half, half)
    for first in range(0, HEADS, AT_ONCE):
        head = (first + tl.arange(0, AT_ONCE))[None, :, None]
        found = (token < tokens) & (head < HEADS)
        here, at = found & (f < half), (FIRST + head) * SIZE + f
        inverse = tl.load(scales + token * scale_row + FIRST + head, found, other=0.0)
        a, b = _halves(x, token * x_row + at, here, half)
        a, b = a * inverse, b * inverse
        turned_a, turned_b = _halves(g, token * g_row + at, here, half)
        g_a, g_b = turned_a * cos + turned_b * sin, turned_b * cos - turned_a * sin
        total_a += g_a * a
        total_b += g_b * b
        g_a, g_b = g_a * w_a, g_b * w_b
        mean = tl.sum(g_a * a + g_b * b, axis=2, keep_dims=True) * (1.0 / SIZE)
        tl.store(g + token * g_row + at, ((g_a - a * mean) * inverse).to(g.dtype.element_ty), here)
        tl.store(g + token * g_row + at + half, ((g_b - b * mean) * inverse).to(g.dtype.element_ty), here)
    return total_a, total_b


@triton.jit
def _put_total(sums, total_a, total_b, HALF: tl.constexpr, half: tl.constexpr):
    """One row of partial sums."""
    f = tl.arange(0, HALF)
    tl.store(sums + f, tl.sum(tl.sum(total_a, axis=1), axis=0), f < half)
    tl.store(sums + half + f, tl.sum(tl.sum(total_b, axis=1), axis=0), f < half)


@triton.jit
def _back(
    x, positions, turns, of_query, of_key, g, scales, sums, tokens, x_row, g_row, scale_row, length,
    QUERY: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERY_AT_ONCE: tl.constexpr,
    KEY_AT_ONCE: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """sums [2, PARTS, SIZE]: of query heads, then of key heads."""
    part = tl.program_id(0)
    f = tl.arange(0, HALF)[None, None, :]
    query_a = tl.zeros((TOKENS, QUERY_AT_ONCE, HALF), tl.float32)
    query_b = tl.zeros((TOKENS, QUERY_AT_ONCE, HALF), tl.float32)
    key_a = tl.zeros((TOKENS, KEY_AT_ONCE, HALF), tl.float32)
    key_b = tl.zeros((TOKENS, KEY_AT_ONCE, HALF), tl.float32)
    for first in range(part * TOKENS, tokens, PARTS * TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
        cos, sin = cos_and_sin(positions, turns, token, tokens, f, SIZE // 2, length)
        query_a, query_b = _back_some(x, of_query, g, scales, query_a, query_b, token, tokens, cos, sin, f, x_row,
                                      g_row, scale_row, 0, QUERY, SIZE, QUERY_AT_ONCE)  # fmt: skip
        key_a, key_b = _back_some(x, of_key, g, scales, key_a, key_b, token, tokens, cos, sin, f, x_row,
                                  g_row, scale_row, QUERY, KEY, SIZE, KEY_AT_ONCE)  # fmt: skip
    _put_total(sums + part * SIZE, query_a, query_b, HALF, SIZE // 2)
    _put_total(sums + (PARTS + part) * SIZE, key_a, key_b, HALF, SIZE // 2)


def _shape(site: Site, tile: int) -> dict[str, int]:
    """Heads, and how many of them a program has at a time."""
    size = int(site.attrs["head_size"])
    query, key = (width // size for width in site.attrs["widths"][:2])
    half = power_of_two(size // 2)
    most = max(1, tile // (_TOKENS * half))
    return {
        "QUERY": query, "KEY": key, "SIZE": size, "TOKENS": _TOKENS, "HALF": half,
        "QUERY_AT_ONCE": min(most, power_of_two(query)),
        "KEY_AT_ONCE": min(most, power_of_two(key)), "num_warps": _WARPS,
    }  # fmt: skip


@Bindable
def put_heads(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """packed [s, B, (H + 2·K)·C], positions [s, B] -> query and key heads, normalised and rotated [s, B, (H + K)·C],
    and 1 / the root mean square of each [s, B, H + K]."""
    (packed, positions), (heads, scales) = ins, outs
    tokens = positions.numel()
    return bind(
        _put, (tiles(tokens, _TOKENS),), packed, positions, turns(site, packed.device), *weights, heads, scales, tokens,
        row_stride(packed), row_stride(heads), row_stride(scales), length_of(site), float(site.attrs["epsilon"]),
        **_shape(site, _TILE),
    )  # fmt: skip


@Bindable
def take_back(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The first columns of a packed gradient, of heads as `put_heads` makes them, become those of its input; partial
    sums of the weights' gradients [2, PARTS, C]."""
    (packed, positions, scales), (gradient, sums) = ins, outs
    return bind(
        _back, (PARTS,), packed, positions, turns(site, packed.device), *weights, gradient, scales, sums,
        positions.numel(), row_stride(packed), row_stride(gradient), row_stride(scales), length_of(site), PARTS=PARTS,
        **_shape(site, _BACK),
    )  # fmt: skip


@Bindable
def put_sums(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """Partial sums [2, PARTS, C] -> gradients of both weights [C], written or added."""
    return in_turn(*[put_sum.bind(sums, y, add) for sums, y in zip(ins[0], into, strict=True)])
