"""Routing on GPUs: the order of token copies, copies sent to their experts, and summed again, each in one pass.

Copies are sorted by counting: a block of them counts its experts, sums over the blocks before say where it begins, and
each copy goes behind those of its expert before it. Copies of other ranks' experts go last, and are not moved.
Rows of width D are moved token by token: `places` [tokens·k], the inverse of the order, says where the copies of a
token lie. Sums are in one order, so every run gives the same bits.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import BoundLaunch, bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.strides import row_count, row_stride
from penteract.ops.declarations.moe.experts import sharing
from penteract.ops.declarations.moe.one_pass_experts import COPIES
from penteract.ops.tape import Site

_COLUMNS = 2048  # of a row that a program has at a time, at most
_AT_ONCE = 128  # experts that a block is compared with at a time
_BLOCKS = 1024  # whose counts are summed at a time
_INVERSE = 1024  # copies of a program that finds places
_ROUTED = ("rows",)  # a number that routing decides: no code of its own for each kind


def _some(site: Site) -> bool:
    """Whether other ranks' experts get some of the copies."""
    return sharing(site.attrs) > 1


def _chosen(site: Site) -> int:
    """The experts that a token chooses."""
    return int(site.attrs["top_k"])


# ---- order -----------------------------------------------------------------------------------------------------------


@triton.jit
def _bin(experts, at, there, first, OWN: tl.constexpr):
    """What a copy is counted by: its expert, from this rank's `first` of `OWN` on, or `OWN`, if another rank has it; -1
    where there is none."""
    own = tl.load(experts + at, there, other=0).to(tl.int32) - first
    return tl.where(there, tl.where((own >= 0) & (own < OWN), own, OWN), -1)


@triton.jit
def _count(
    experts, counts, copies, blocks, first_own, X: tl.constexpr, OWN: tl.constexpr, COPIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """counts [X, blocks]: copies of each expert in each block."""
    block = tl.program_id(0)
    at = block * COPIES + tl.arange(0, COPIES)
    own = _bin(experts, at, at < copies, first_own, OWN)
    for first in tl.static_range(0, X, AT_ONCE):
        x = first + tl.arange(0, AT_ONCE)
        found = tl.sum((own[:, None] == x[None, :]).to(tl.int32), axis=0)
        tl.store(counts + x * blocks + block, found, x < X)


@triton.jit
def _sum_blocks(counts, totals, blocks, OWN: tl.constexpr, BLOCKS: tl.constexpr):
    """A program for each expert: counts become those of the blocks before; `totals` [OWN]."""
    x = tl.program_id(0)
    total = x * 0
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        some = tl.load(counts + x * blocks + block, block < blocks, other=0)
        tl.store(counts + x * blocks + block, total + tl.cumsum(some, axis=0) - some, block < blocks)
        total += tl.sum(some, axis=0)
    tl.store(totals + x, total.to(totals.dtype.element_ty), x < OWN)


@triton.jit
def _put_in_order(
    experts, counts, totals, order, copies, blocks, first_own, X: tl.constexpr, OWN: tl.constexpr,
    COPIES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Behind all of the experts before, those of its own in the blocks before, and those before it in its block."""
    block = tl.program_id(0)
    i = tl.arange(0, COPIES)
    at = block * COPIES + i
    own = _bin(experts, at, at < copies, first_own, OWN)
    place = tl.load(counts + own * blocks + block, at < copies, other=0)
    for first in tl.static_range(0, X, AT_ONCE):
        x = first + tl.arange(0, AT_ONCE)
        total = tl.load(totals + x, x < OWN, other=0).to(tl.int32)
        place += tl.sum(tl.where(x[None, :] < own[:, None], total[None, :], 0), axis=1)
    before = (own[:, None] == own[None, :]) & (i[None, :] < i[:, None])
    place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(order + place, at.to(order.dtype.element_ty), at < copies)


@Bindable
def expert_permutation(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The order that sorts token copies by expert, [s·B·k], and how many each expert has, [X]. Of several ranks, this
    one's experts come first, and only these are counted."""
    experts, (order, totals), shared = ins[0], outs, _some(site)
    copies, own = experts.numel(), len(totals)
    blocks, first, x = triton.cdiv(copies, COPIES), env.index("ep") * own if shared else 0, own + shared
    tile = {"X": x, "OWN": own, "COPIES": COPIES, "AT_ONCE": min(_AT_ONCE, triton.next_power_of_2(x)), "num_warps": 4}
    some = min(_BLOCKS, triton.next_power_of_2(blocks))
    count = bind(_count, (blocks,), experts, None, copies, blocks, first, **tile)
    sum_blocks = bind(_sum_blocks, (x,), None, totals, blocks, OWN=own, BLOCKS=some, num_warps=4)
    put_in_order = bind(_put_in_order, (blocks,), experts, None, totals, order, copies, blocks, first, **tile)

    def run() -> None:
        counts = torch.empty(x * blocks, dtype=torch.int32, device=experts.device)
        for call in (count, sum_blocks, put_in_order):
            call(counts=counts)

    return run


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def _invert(order, places, copies, COPIES: tl.constexpr):
    at = tl.program_id(0) * COPIES + tl.arange(0, COPIES)
    copy = tl.load(order + at, at < copies, other=0)
    tl.store(places + copy, at, at < copies)


@triton.jit(do_not_specialize=_ROUTED)
def _send(
    x, places, out, rows, x_row, out_row, K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SOME: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """x [tokens, D] -> out [rows, D]: a token's row to the places of its copies; `SOME`: of those that have one.
    `PADDED`: `rows` is where their number lies, and there is room for more."""
    if PADDED:
        rows = tl.load(rows)
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(x + token * x_row + c, c < WIDTH, other=0.0)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        tl.store(out + place * out_row + c, row, c < (tl.where(place < rows, WIDTH, 0) if SOME else WIDTH))


@triton.jit(do_not_specialize=_ROUTED)
def _sum_copies(
    y, w, places, out, rows, y_row, out_row, K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    WEIGHED: tl.constexpr, SOME: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """y [rows, D] -> out [tokens, D]: the sum of a token's copies, `WEIGHED` by w [tokens, K]; `SOME`: of those that y
    has."""
    if PADDED:
        rows = tl.load(rows)
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        here = c < (tl.where(place < rows, WIDTH, 0) if SOME else WIDTH)
        one = tl.load(y + place * y_row + c, here, other=0.0).to(tl.float32)
        if WEIGHED:
            one = one * tl.load(w + token * K + k).to(tl.float32)
        total += one
    tl.store(out + token * out_row + c, total.to(out.dtype.element_ty), c < WIDTH)


@triton.jit(do_not_specialize=_ROUTED)
def _send_weighed(
    y, w, places, g, of_y, of_w, rows, y_row, g_row, of_y_row, K: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, SOME: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """g [tokens, D] -> gradients of the copies y and of their weights: g times the weight, g times the copy summed.
    `SOME`: the weight of a copy that y has not has none, 0."""
    if PADDED:
        rows = tl.load(rows)
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    gradient = tl.load(g + token * g_row + c, c < WIDTH, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        weight = tl.load(w + token * K + k).to(tl.float32)
        both = tl.zeros((COLUMNS,), tl.float32)
        for first in tl.static_range(0, WIDTH, COLUMNS):
            c = first + tl.arange(0, COLUMNS)
            if WIDTH > COLUMNS:  # else all of the row is there
                gradient = tl.load(g + token * g_row + c, c < WIDTH, other=0.0).to(tl.float32)
            here = c < (tl.where(place < rows, WIDTH, 0) if SOME else WIDTH)
            both += gradient * tl.load(y + place * y_row + c, here, other=0.0).to(tl.float32)
            tl.store(of_y + place * of_y_row + c, (gradient * weight).to(of_y.dtype.element_ty), here)
        tl.store(of_w + token * K + k, tl.sum(both, axis=0).to(of_w.dtype.element_ty))


def _with_places(order: torch.Tensor, move: BoundLaunch) -> Bound:
    """A launch that is given the place of each copy, [copies]; order [copies]."""
    invert = bind(_invert, (triton.cdiv(len(order), _INVERSE),), order, None, len(order), COPIES=_INVERSE, num_warps=4)

    def run() -> None:
        places = torch.empty(order.shape, dtype=torch.int32, device=order.device)
        invert(places=places)
        move(places=places)

    return run


def _number(x: torch.Tensor, ends: Tensors) -> torch.Tensor | int:
    """How many rows of x there are: all, or as many as the last of padded rows' offsets says."""
    return ends[0][-1:] if ends else len(x)


def tile_of(width: int) -> dict[str, int]:
    """The columns of a row that a program has at a time."""
    wide = min(_COLUMNS, triton.next_power_of_2(width))
    return {"WIDTH": width, "COLUMNS": wide, "num_warps": max(1, min(8, wide // 256))}


# Launches that move rows of tokens. `places` of their copies: None if each launch is given them. `ends`: of padded
# rows.


def sent(
    x: torch.Tensor, places: torch.Tensor | None, out: torch.Tensor, k: int, ends: Tensors, *, some: bool = False
) -> BoundLaunch:
    """Each token's row to the places of its copies."""
    tile = tile_of(x.shape[-1])
    grid = (row_count(x), triton.cdiv(x.shape[-1], tile["COLUMNS"]))
    about = _number(out, ends), row_stride(x), row_stride(out)
    return bind(_send, grid, x, places, out, *about, K=k, SOME=some, PADDED=bool(ends), **tile)


def summed(
    y: torch.Tensor, w: torch.Tensor | None, places: torch.Tensor | None, out: torch.Tensor, k: int, ends: Tensors,
    *, some: bool = False,
) -> BoundLaunch:  # fmt: skip
    """Each token's sum of its copies, weighted if there are weights."""
    tile = tile_of(y.shape[-1])
    grid = (row_count(out), triton.cdiv(y.shape[-1], tile["COLUMNS"]))
    about = y if w is None else w, places, out, _number(y, ends), row_stride(y), row_stride(out)
    tile |= {"SOME": some, "PADDED": bool(ends)}
    return bind(_sum_copies, grid, y, *about, K=k, WEIGHED=w is not None, **tile)


def sent_weighed(
    y: torch.Tensor, w: torch.Tensor, places: torch.Tensor | None, g: torch.Tensor, outs: Tensors, k: int,
    ends: Tensors, *, some: bool = False,
) -> BoundLaunch:  # fmt: skip
    """Gradients of copies and of their weights, from each token's."""
    of_y, of_w = outs
    rows = _number(y, ends), row_stride(y), row_stride(g), row_stride(of_y)
    tile = {"SOME": some, "PADDED": bool(ends), **tile_of(y.shape[-1])}
    return bind(_send_weighed, (row_count(g),), y, w, places, g, of_y, of_w, *rows, K=k, **tile)


@Bindable
def permute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Token copies in the order of their experts: [s, B, D] -> [s·B·k, D], or the first of them."""
    x, order, *ends = ins
    return _with_places(order, sent(x, None, outs[0], _chosen(site), ends, some=_some(site)))


@Bindable
def permute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The sum of the gradients of a token's copies, in the order of its experts' ranks."""
    order, *ends, g = ins
    return _with_places(order, summed(g, None, None, outs[0], _chosen(site), ends, some=_some(site)))


@Bindable
def unpermute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Each token's sum of its copies, weighted: [s·B·k, D] -> [s, B, D]."""
    y, w, order, *ends = ins
    return _with_places(order, summed(y, w, None, outs[0], _chosen(site), ends, some=_some(site)))


@Bindable
def unpermute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Gradients of the copies and of the weights."""
    y, w, order, *ends, g = ins
    return _with_places(order, sent_weighed(y, w, None, g, outs, _chosen(site), ends, some=_some(site)))


# ---- chunks ----------------------------------------------------------------------------------------------------------


@triton.jit
def _find_chunks(coming, ends, begins, ranks, own, CHUNKS: tl.constexpr):
    """coming [ranks, own experts] -> where each chunk ends by sender, and where it begins by expert; one program."""
    i = tl.arange(0, CHUNKS)
    there = i < ranks * own
    n = tl.load(coming + i, there, other=0).to(tl.int32)
    tl.store(ends + i, tl.cumsum(n, axis=0), there)
    at = i % ranks * own + i // ranks  # the chunk that is number i by expert
    n = tl.load(coming + at, there, other=0).to(tl.int32)
    tl.store(begins + at, tl.cumsum(n, axis=0) - n, there)


@triton.jit
def move_row(
    x, out, row, place, x_row, out_row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Some columns of a row of x to a place of `out`; `INVERSE`: of the place to the row."""
    read = place if INVERSE else row
    written = row if INVERSE else place
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.load(x + read.to(tl.int64) * x_row + c, c < WIDTH, other=0.0)
    tl.store(out + written.to(tl.int64) * out_row + c, found, c < WIDTH)


@triton.jit
def _move_chunks(
    x, ends, begins, out, x_row, out_row, chunks, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """A row by sender to its place by expert; `INVERSE`: back."""
    row = tl.program_id(0)
    i = tl.arange(0, CHUNKS)
    end = tl.load(ends + i, i < chunks, other=2147483647)
    chunk = tl.sum((end <= row).to(tl.int32), axis=0)
    first = tl.max(tl.where(end <= row, end, 0), axis=0)
    place = tl.load(begins + chunk) + row - first
    move_row(x, out, row, place, x_row, out_row, WIDTH, COLUMNS, INVERSE)


def sort_chunks(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Rows by sender and then expert -> by expert and then sender; `inverse`: the other way."""
    (x, coming), out, ranks, chunks = ins, outs[0], int(site.attrs["ranks"]), len(ins[1])
    if not len(x):
        return
    ends, begins = torch.empty(2, chunks, dtype=torch.int32, device=x.device)
    most = triton.next_power_of_2(chunks)
    _find_chunks[(1,)](coming, ends, begins, ranks, chunks // ranks, CHUNKS=most, num_warps=4)
    tile = tile_of(x.shape[-1])
    grid = (len(x), triton.cdiv(x.shape[-1], tile["COLUMNS"]))
    rows, inverse = (row_stride(x), row_stride(out)), bool(site.attrs["inverse"])
    _move_chunks[grid](x, ends, begins, out, *rows, chunks, CHUNKS=most, INVERSE=inverse, **tile)


EXPERTS = {
    "expert_permutation": TorchKernel(expert_permutation),
    "permute": TorchKernel(permute, permute_input),
    "padded_permute": TorchKernel(permute, permute_input),
    "padded_unpermute": TorchKernel(unpermute, unpermute_input),
    "sort_chunks": TorchKernel(sort_chunks),
    "unpermute": TorchKernel(unpermute, unpermute_input),
}
