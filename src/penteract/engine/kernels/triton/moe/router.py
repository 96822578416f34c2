"""Routing on GPUs: products of 16-bit factors, as `narrow_router.py` declares them, and a kernel each way for the rest:
from logits to the chosen experts, and from gradients to those of the logits.

A program has some tokens of one sequence, with all of their experts, group by group: each group begins at a multiple of
a power of two. The best expert is the largest of whole numbers that hold a score and a place: an order in which no two
are equal, the first of equal scores is the largest, and NaN is larger than all numbers, so that a diverged run chooses
experts that exist.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import BoundLaunch, bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, in_turn, put, put_product
from penteract.engine.kernels.moe import experts
from penteract.engine.kernels.triton.bits import narrow, wide
from penteract.engine.kernels.wide_product import is_wide, put_wide_product, wide_product
from penteract.ops.declarations.moe.narrow_router import PARTS
from penteract.ops.tape import Site

_TILE = 2048  # scores of a program
_SPLIT_TILE = 4096
_COLUMNS = 128  # of a row that is split, at most
_UNROLLED = tl.constexpr(
    16
)  # experts a token that need no loop: with 64, the code of each would take minutes to compile
_NONE = tl.constexpr(-(2**63))  # less than every place


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _ranked(x, place, places: tl.constexpr):
    """fp32 -> int64: its order, then that of its place, the first of which is the largest."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)  # NaN may have a sign
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (places - 1 - place).to(tl.int64)


@triton.jit
def _place(ranked, places: tl.constexpr):
    return places - 1 - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _score(ranked):
    """The number that was ranked."""
    bits = (ranked >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _of_best_groups(
    ranked, ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, CHOSEN: tl.constexpr, TWO: tl.constexpr
):
    """ranked [ROWS, COLUMNS], groups of `PLACES`, without experts outside of a token's best groups: by their best
    expert, or the sum of two."""
    GROUPS: tl.constexpr = COLUMNS // PLACES
    by_group = tl.reshape(ranked, (ROWS, GROUPS, PLACES))
    best = tl.max(by_group, axis=2)
    worth = _score(best)
    if TWO:
        worth += _score(tl.max(tl.where(by_group == best[:, :, None], _NONE, by_group), axis=2))
    left = tl.where(best == _NONE, _NONE, _ranked(worth, tl.arange(0, GROUPS)[None, :], GROUPS))
    chosen = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(CHOSEN):
        found = left == tl.max(left, axis=1)[:, None]
        chosen += found.to(tl.int32)
        left = tl.where(found, _NONE, left)
    return tl.reshape(tl.where((chosen > 0)[:, :, None], by_group, _NONE), (ROWS, COLUMNS))


@triton.jit
def _take(left, x, place, weight, counted, to, COLUMNS: tl.constexpr):
    """Take the best of each token: its place and weight go `to` a copy, and it is not left."""
    best = tl.max(left, axis=1)[:, None]
    found = left == best
    place = tl.where(to, _place(best, COLUMNS), place)
    weight = tl.where(to, tl.sum(tl.where(found, x, 0.0), axis=1)[:, None], weight)
    return tl.where(found, _NONE, left), place, weight, counted + found.to(tl.int32)


@triton.jit
def _choose(
    scores, chosen, experts, choices, bias, tokens, sequences, X: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """scores [tokens, sequences, X], logits that become scores -> chosen, experts [tokens, sequences, K]; choices
    [sequences, X] are counted. Groups of `SIZE` experts have `PLACES` of the `COLUMNS`."""
    sequence = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = t.to(tl.int64) * sequences + sequence
    c = tl.arange(0, COLUMNS)
    x_of = c // PLACES * SIZE + c % PLACES
    is_expert = (c % PLACES < SIZE) & (x_of < X)
    here, exists = t[:, None] < tokens, is_expert[None, :]
    at = scores + row[:, None] * X + x_of[None, :]
    x = tl.load(at, here & exists, other=0.0)
    if SOFTMAX:
        x = tl.where(exists, x, float("-inf"))
        x = tl.exp(x - tl.max(x, axis=1)[:, None])
        x = x / tl.sum(x, axis=1)[:, None]
    else:
        x = 1 / (1 + tl.exp(-x))
    tl.store(at, x, here & exists)

    ranking = x
    if BIAS:
        ranking += tl.load(bias + x_of, is_expert, other=0.0)[None, :]
    left = tl.where(exists, _ranked(ranking, c[None, :], COLUMNS), _NONE)
    if SIZE < X:
        left = _of_best_groups(left, ROWS, PLACES, COLUMNS, TOP_GROUPS, TOP2)
    copy = tl.arange(0, COPIES)[None, :]
    weight = tl.zeros((ROWS, COPIES), tl.float32)
    place = tl.zeros((ROWS, COPIES), tl.int32)
    counted = tl.zeros((ROWS, COLUMNS), tl.int32)
    if K <= _UNROLLED:
        for k in tl.static_range(K):
            left, place, weight, counted = _take(left, x, place, weight, counted, copy == k, COLUMNS)
    else:
        for k in range(K):
            left, place, weight, counted = _take(left, x, place, weight, counted, copy == k, COLUMNS)
    expert = place // PLACES * SIZE + place % PLACES
    if NORMALIZE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    to = row[:, None] * K + copy
    tl.store(chosen + to, narrow(weight * SCALE, chosen.dtype.element_ty), here & (copy < K))
    tl.store(experts + to, expert.to(tl.int64), here & (copy < K))
    counts = tl.sum(tl.where(here, counted, 0), axis=0)
    tl.atomic_add(choices + sequence * X + x_of, counts.to(tl.int64), is_expert & (counts > 0))


def choice(env: Env, site: Site, outs: Tensors) -> Bound:
    """What makes the outs of a router, of which scores [S, B, X] are logits yet."""
    (chosen, index, scores, choices), a = outs, site.attrs
    tokens, sequences, x = scores.shape
    size = x // a["groups"]
    places = triton.next_power_of_2(size)
    columns = places * triton.next_power_of_2(a["groups"])
    rows = max(1, min(triton.next_power_of_2(tokens), _TILE // columns))
    choose = bind(
        _choose, (triton.cdiv(tokens, rows), sequences), scores, chosen, index, choices, None if a["bias"] else scores,
        tokens, sequences, X=x, K=a["top_k"], SOFTMAX=a["score"] == "softmax", BIAS=bool(a["bias"]),
        NORMALIZE=a["normalize"], SCALE=float(a["scale"]), SIZE=size, TOP_GROUPS=a["top_groups"],
        TOP2=a["group_score"] == "top2", ROWS=rows, PLACES=places, COLUMNS=columns,
        COPIES=triton.next_power_of_2(a["top_k"]), num_warps=4,
    )  # fmt: skip

    def run() -> None:
        choices.zero_()
        choose(**({"bias": env.biases[a["bias"]]} if a["bias"] else {}))

    return run


def _router(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x [S, B, D] -> weights and experts [S, B, k], scores [S, B, X] and choices [B, X]."""
    x, logits = _rows(ins[0]), _rows(outs[2])
    if is_wide(logits, x):
        product = wide_product(aten, logits, x, weights[0].t(), False)
    else:
        product = partial(experts.put_logits, env, ins, weights, outs)
    if env.stat == torch.float32:
        return in_turn(product, choice(env, site, outs))
    return in_turn(product, partial(experts.choose_experts, env, site, outs))


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _put_parts(parts, at, rest, here, X: tl.constexpr):
    """The nearest number of 16 bits, that of the rest, that of its rest: each rest is exact in fp32."""
    for part in tl.static_range(3):
        nearest = narrow(rest, parts.dtype.element_ty)
        tl.store(parts + at + part * X, nearest, here)
        rest -= wide(nearest)


@triton.jit
def _split(x, parts, rows, X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, X] in fp32 -> parts [rows, 3·X]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (row < rows) & (c < X)
    _put_parts(parts, row * (3 * X) + c, tl.load(x + row * X + c, here, other=0.0), here, X)


@triton.jit
def _slopes(
    experts, scores, g, g_scores, slopes, parts, rows, X: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, BALANCE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """experts, g [rows, K], of the chosen weights; scores, g_scores [rows, X] -> slopes [rows, X], of the logits, and
    their parts [rows, 3·X]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)[None, :]
    there = row < rows
    here = there[:, None] & (c < X)
    at = row[:, None] * X + c
    score = tl.load(scores + at, here, other=0.0)
    slope = tl.zeros((ROWS, COLUMNS), tl.float32)
    chosen = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(experts + row * K + k, there, other=0).to(tl.int32)
        of_weight = wide(tl.load(g + row * K + k, there, other=0.0))
        slope = tl.where(c == expert[:, None], of_weight[:, None], slope)
        chosen = tl.where(c == expert[:, None], score, chosen)
    if NORMALIZE:  # of a chosen score that is 0, the logit has no gradient
        total = tl.where(there, tl.sum(chosen, axis=1), 1.0)[:, None]
        share = chosen / total
        slope = tl.where(chosen == 0, slope, (slope - tl.sum(share * slope, axis=1)[:, None]) / total)
    slope = slope * SCALE
    if BALANCE:
        slope += tl.load(g_scores + at, here, other=0.0)
    if SOFTMAX:
        slope = (slope - tl.sum(slope * score, axis=1)[:, None]) * score
    else:
        slope = slope * score
        slope -= slope * score
    tl.store(slopes + at, slope, here)
    if SPLIT:
        _put_parts(parts, row[:, None] * (3 * X) + c, slope, here, X)


def splitting(x: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """What splits x [.., X] in fp32, contiguous -> [rows, 3·X] of 16 bits: three parts of each row, side by side, whose
    sum it is."""
    width = x.shape[-1]
    rows = x.numel() // width
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    some = _SPLIT_TILE // columns
    grid = triton.cdiv(rows, some), triton.cdiv(width, columns)
    put_parts = bind(_split, grid, x, None, rows, X=width, ROWS=some, COLUMNS=columns, num_warps=4)

    def run() -> torch.Tensor:
        parts = torch.empty(rows, PARTS * width, dtype=dtype, device=x.device)
        put_parts(parts=parts)
        return parts

    return run


def _slopes_of(site: Site, ins: Tensors, slope: torch.Tensor, *, in_parts: bool) -> BoundLaunch:
    """What makes the gradient of the logits, `slope` [S, B, X], from what `router_input` reads; `in_parts`: and its
    parts, which the launch is given."""
    (index, scores, g, *g_scores), a = ins, site.attrs
    x = slope.shape[-1]
    rows, columns = slope.numel() // x, triton.next_power_of_2(x)
    some = max(1, min(triton.next_power_of_2(rows), _TILE // columns))
    return bind(
        _slopes, (triton.cdiv(rows, some),), index, scores, g, g_scores[0] if g_scores else scores, slope,
        None if in_parts else slope, rows, X=x, K=a["top_k"], SOFTMAX=a["score"] == "softmax",
        NORMALIZE=a["normalize"], SCALE=float(a["scale"]), BALANCE=bool(g_scores), SPLIT=in_parts, ROWS=some,
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@Bindable
def _router_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The gradient of x; keeps that of the logits."""
    (out, slope), w = outs, weights[0]
    if env.stat != torch.float32:
        return partial(experts.router_input, env, site, ins, weights, outs)
    rows = _rows(out)
    if not is_wide(slope, w):
        put_slopes = _slopes_of(site, ins, slope, in_parts=False)
        return in_turn(put_slopes, lambda: put_product(rows, _rows(slope), w.to(env.stat), False))
    put_slopes = _slopes_of(site, ins, slope, in_parts=True)

    def run() -> None:
        parts = torch.empty(len(rows), PARTS * len(w), dtype=w.dtype, device=w.device)
        put_slopes(parts=parts)
        torch.mm(parts, w.repeat(PARTS, 1), out=rows)

    return run


def _router_weight(aten: Any, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """gᵀ·x, [X, D], of the logits' gradient: that of each part, summed from the smallest up."""
    x, slope = _rows(ins[0]), ins[1]
    if not is_wide(slope, x):
        return partial(experts.router_weight, env, site, ins, into, add)
    split = splitting(slope, x.dtype)

    def run() -> None:
        parts = split()
        made = torch.empty(parts.shape[1], x.shape[1], dtype=slope.dtype, device=x.device)
        put_wide_product(aten, made, parts.t(), x, False)
        first, second, third = made.chunk(PARTS)
        put(into[0], third.add_(second).add_(first), add)

    return run


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def routers(aten: Any) -> dict[str, TorchKernel]:
    """The kernel, over the operators of `aten`."""
    forward, weight_gradient = Bindable(partial(_router, aten)), Bindable(partial(_router_weight, aten))
    return {"router": TorchKernel(forward, _router_input, weight_gradient)}


ROUTER = routers(torch.ops.aten)
