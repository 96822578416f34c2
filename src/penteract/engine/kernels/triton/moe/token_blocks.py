"""Blocks of rows on GPUs: where each copy of a token lies in them is found once, from the counts of experts, and serves
all that move rows. What the host does not know, how many rows a block has, is read where a row is moved."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.moe.token_copies import move_row, sent, sent_weighed, summed, tile_of
from penteract.engine.kernels.triton.strides import power_of_two, row_stride
from penteract.ops.tape import Site

_COMPARED = 4096  # copies times ranks that a program compares
_MOST_PLACED = 256  # copies of a program


@triton.jit
def _place_copies(
    order, copies, places, kept, overflow, n, ranks, own, block, RANKS: tl.constexpr, OWN: tl.constexpr,
    COPIES: tl.constexpr, NOTED: tl.constexpr,
):  # fmt: skip
    """The row of each copy: its rank's block, and in it behind all copies for that rank before. The first program says
    how many of each expert have room, and if some have none."""
    r, x = tl.arange(0, RANKS), tl.arange(0, OWN)
    at = r[:, None] * own + x[None, :]
    there = (r[:, None] < ranks) & (x[None, :] < own)
    count = tl.load(copies + at, there, other=0).to(tl.int32)
    of_rank = tl.sum(count, axis=1)
    ends = tl.cumsum(of_rank, axis=0)
    if tl.program_id(0) == 0:
        until = tl.cumsum(count, axis=1)
        fit = tl.minimum(until, block) - tl.minimum(until - count, block)
        tl.store(kept + at, fit.to(kept.dtype.element_ty), there)
        if NOTED:
            tl.store(overflow, float("nan"), tl.max(of_rank, axis=0) > block)
    row = tl.program_id(0) * COPIES + tl.arange(0, COPIES)
    copy = tl.load(order + row, row < n, other=0)
    before = ends[None, :] <= row[:, None]  # ranks whose copies are
    rank = tl.sum(before.to(tl.int32), axis=1)
    begin = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    place = rank * block + tl.minimum(row - begin, block - 1)
    tl.store(places + copy, place.to(places.dtype.element_ty), row < n)


@Bindable
def block_places(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Where each copy lies in the blocks, [s·B·k], and how many of each expert have room, [X]."""
    (order, copies), (places, kept), ranks, note = ins, outs, int(site.attrs["ranks"]), env.overflow
    n, own = len(order), len(copies) // ranks
    most = power_of_two(ranks)
    some = max(16, min(_MOST_PLACED, _COMPARED // most))
    about = n, ranks, own, int(site.attrs["block"])
    tile = {"RANKS": most, "OWN": power_of_two(own), "COPIES": some, "NOTED": note is not None, "num_warps": 4}
    return bind(
        _place_copies, (max(1, triton.cdiv(n, some)),), order, copies, places, kept, kept if note is None else note,
        *about, **tile,
    )  # fmt: skip


@Bindable
def block_permute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Token copies at their places: [s, B, D] -> [ranks·block, D]. All else is left as it is."""
    x, places = ins
    return sent(x, places, outs[0], int(site.attrs["top_k"]), [])


@Bindable
def block_permute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """The sum of the gradients of a token's copies."""
    places, g = ins
    return summed(g, None, places, outs[0], int(site.attrs["top_k"]), [])


@Bindable
def block_unpermute(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Each token's sum of its copies, weighted: [ranks·block, D] -> [s, B, D]."""
    y, w, places = ins
    return summed(y, w, places, outs[0], int(site.attrs["top_k"]), [])


@Bindable
def block_unpermute_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Gradients of the copies, at their places, and of the weights."""
    y, w, places, g = ins
    return sent_weighed(y, w, places, g, outs, int(site.attrs["top_k"]), [])


@triton.jit
def _find_blocks(coming, ends, begins, ranks, own, block, RANKS: tl.constexpr, OWN: tl.constexpr, CHUNKS: tl.constexpr):
    """coming [ranks, own experts] -> where each chunk ends in its block, and where it begins by expert; one program."""
    r, x = tl.arange(0, RANKS), tl.arange(0, OWN)
    at = r[:, None] * own + x[None, :]
    there = (r[:, None] < ranks) & (x[None, :] < own)
    until = tl.cumsum(tl.load(coming + at, there, other=0).to(tl.int32), axis=1)
    tl.store(ends + at, r[:, None] * block + until, there)
    i = tl.arange(0, CHUNKS)
    chunk = i % ranks * own + i // ranks  # that is number i by expert
    n = tl.load(coming + chunk, i < ranks * own, other=0).to(tl.int32)
    tl.store(begins + chunk, tl.cumsum(n, axis=0) - n, i < ranks * own)


@triton.jit
def _move_blocks(
    x, ends, begins, out, x_row, out_row, own, chunks, block, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A row of a block to its place by expert; `INVERSE`: back. What is behind a block's rows is neither read nor
    written."""
    row = tl.program_id(0)
    sender = row // block
    if row < tl.load(ends + sender * own + own - 1):
        i = tl.arange(0, CHUNKS)
        end = tl.load(ends + i, i < chunks, other=2147483647)
        chunk = tl.sum((end <= row).to(tl.int32), axis=0)
        first = tl.maximum(tl.max(tl.where(end <= row, end, 0), axis=0), sender * block)
        place = tl.load(begins + chunk) + row - first
        move_row(x, out, row, place, x_row, out_row, WIDTH, COLUMNS, INVERSE)


@Bindable
def sort_blocks(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """Rows in blocks by sender -> by expert and then sender; `inverse`: the other way."""
    (x, coming), out, ranks, block = ins, outs[0], int(site.attrs["ranks"]), int(site.attrs["block"])
    chunks, own = len(coming), len(coming) // ranks
    most = power_of_two(chunks)
    sizes = {"RANKS": power_of_two(ranks), "OWN": power_of_two(own), "CHUNKS": most, "num_warps": 4}
    find = bind(_find_blocks, (1,), coming, None, None, ranks, own, block, **sizes)
    tile = tile_of(x.shape[-1])
    grid = (ranks * block, triton.cdiv(x.shape[-1], tile["COLUMNS"]))
    about = row_stride(x), row_stride(out), own, chunks, block
    tile |= {"CHUNKS": most, "INVERSE": bool(site.attrs["inverse"])}
    move = bind(_move_blocks, grid, x, None, None, out, *about, **tile)

    def run() -> None:
        ends, begins = torch.empty(2, chunks, dtype=torch.int32, device=x.device)
        find(ends=ends, begins=begins)
        move(ends=ends, begins=begins)

    return run


BLOCKS = {
    "block_places": TorchKernel(block_places),
    "block_permute": TorchKernel(block_permute, block_permute_input),
    "sort_blocks": TorchKernel(sort_blocks),
    "block_unpermute": TorchKernel(block_unpermute, block_unpermute_input),
}
