"""The gradient of a table of embeddings, without atomics: ids are sorted, and each run of one id is summed in the order
of its tokens, in fp32, so that the result is the same in every run."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.dense import embedding
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.strides import row_stride
from penteract.ops.tape import Site

_COLUMNS = 2048  # of a program
_ROWS = 8  # tokens of a run that are summed at a time
_WARPS = 4


@triton.jit
def _sum_runs(
    ids, order, g, into, tokens, begin, rows, g_row, into_row, WIDTH: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each sorted id and some columns; who does not begin a run has nothing to do, nor who begins that of
    another shard: the table's rows here are `rows`, from `begin` on. Most runs have one token, whose row is read
    without the detour over a tile of several."""
    at = tl.program_id(0)
    own = tl.load(ids + at)
    before = tl.load(ids + tl.maximum(at - 1, 0))
    after = tl.load(ids + at + 1, at + 1 < tokens, other=-1)
    row = own - begin
    if ((at == 0) | (before != own)) & (row >= 0) & (row < rows):
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        if after != own:
            summed = tl.load(g + tl.load(order + at) * g_row + c, c < WIDTH, other=0.0).to(tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            more = 1
            while more == 1:
                places = at + tl.arange(0, ROWS)
                same = (places < tokens) & (tl.load(ids + places, places < tokens, other=0) == own)
                token = tl.load(order + places, same, other=0)
                some = tl.load(g + token[:, None] * g_row + c[None, :], same[:, None] & (c < WIDTH)[None, :], other=0.0)
                total += some.to(tl.float32)
                more = tl.min(same.to(tl.int32), axis=0)
                at += ROWS
            summed = tl.sum(total, axis=0)
        place = into + row * into_row + c
        if ADD:
            summed += tl.load(place, c < WIDTH, other=0.0).to(tl.float32)
        tl.store(place, summed.to(into.dtype.element_ty), c < WIDTH)


def embedding_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    """Adds the gradients [S, B, D] up in the rows of their ids."""
    flat, g, table = ins[0].reshape(-1), ins[1], into[0]
    ids, order = torch.empty_like(flat), torch.empty_like(flat)
    torch.sort(flat, stable=True, out=(ids, order))
    if not add:
        table.zero_()
    axis = str(site.attrs["axis"])
    rows, width = table.shape
    wide = min(_COLUMNS, triton.next_power_of_2(width))
    _sum_runs[(len(ids), triton.cdiv(width, wide))](
        ids, order, g, table, len(ids), env.index(axis) * rows if axis else 0, rows, row_stride(g), row_stride(table),
        WIDTH=width, ADD=add, ROWS=_ROWS, COLUMNS=wide, num_warps=_WARPS,
    )  # fmt: skip


EMBEDDING = {"embedding": TorchKernel(embedding, None, embedding_weight)}
