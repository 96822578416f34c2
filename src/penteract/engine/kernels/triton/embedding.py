"""The gradient of a table of embeddings, without atomics: ids are sorted, and each run of one id is summed in the order
of its tokens, in fp32, so that the result is the same in every run.

Where a table keeps rows clear (`step/clear_rows.py`), only those are cleared that the last step used: a look at the
first number of each tells which.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.dense import embedding
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.bits import narrow, wide
from penteract.engine.kernels.triton.optimizer.used_rows import marked
from penteract.engine.kernels.triton.strides import row_stride, tiles
from penteract.ops.tape import Site

_LOOKS, _CLEARS = 32, 4  # rows that a program looks at, to clear some; its warps


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """How the kernel is compiled.

    columns  of a program
    rows     tokens of a run that are summed at a time
    warps    of a program
    """

    columns: int = 1024
    rows: int = 8
    warps: int = 4


FORM = EmbeddingForm()  # the one that runs: benchmarks/embedding_forms.py compares


@triton.jit
def _sum_runs(
    ids, order, g, into, tokens, begin, rows, g_row, into_row, WIDTH: tl.constexpr, ADD: tl.constexpr,
    MARK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each sorted id and some columns; who does not begin a run has nothing to do, nor who begins that of
    another shard: the table's rows here are `rows`, from `begin` on. All that it reads of ids comes at once, as rows
    wait for it. Most runs have one token."""
    at = tl.program_id(0)
    own = tl.load(ids + at)
    before = tl.load(ids + at - 1, at > 0, other=-1)
    after = tl.load(ids + at + 1, at + 1 < tokens, other=-1)
    token = tl.load(order + at)
    row = own - begin
    if (before != own) & (row >= 0) & (row < rows):
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        summed = tl.load(g + token * g_row + c, c < WIDTH, other=0.0).to(tl.float32)
        more = after == own
        while more:
            places = at + 1 + tl.arange(0, ROWS)
            same = (places < tokens) & (tl.load(ids + places, places < tokens, other=0) == own)
            tokens_of = tl.load(order + places, same, other=0)
            some = tl.load(g + tokens_of[:, None] * g_row + c[None, :], same[:, None] & (c < WIDTH)[None, :], other=0.0)
            summed += tl.sum(some.to(tl.float32), axis=0)
            more = tl.min(same.to(tl.int32), axis=0) == 1
            at += ROWS
        place = into + row.to(tl.int64) * into_row + c
        if ADD:
            summed += tl.load(place, c < WIDTH, other=0.0).to(tl.float32)
        made = narrow(summed, into.dtype.element_ty)
        if MARK:
            mark = tl.full(made.shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)  # Triton 3.6 has -0.0 as 0.0
            made = tl.where((c == 0) & (wide(made) == 0.0), mark, wide(made)).to(into.dtype.element_ty)
        tl.store(place, made, c < WIDTH)


@triton.jit
def _clear(table, rows, row, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in the rows of a table that are in use; a program has a look at `ROWS`."""
    first, r, c = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    used = marked(tl.load(table + (first + r) * row, first + r < rows, other=0.0)).to(tl.int32)
    tl.debug_barrier()  # all threads have read what some overwrite
    for i in range(ROWS):
        if tl.sum(tl.where(r == i, used, 0), axis=0) > 0:
            for begin in range(0, WIDTH, COLUMNS):
                none = tl.zeros((COLUMNS,), table.dtype.element_ty)
                tl.store(table + (first + i) * row + begin + c, none, begin + c < WIDTH)


@Bindable
def embedding_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """Adds the gradients [S, B, D] up in the rows of their ids."""
    (ids, g), table = ins, into[0]
    (rows, width), marks = table.shape, bool(site.params) and site.params[0] in env.clear_rows
    columns = min(FORM.columns, triton.next_power_of_2(width))
    clear: list[Bound] = [] if add else [table.zero_]
    if clear and marks:
        clear = [
            bind(
                _clear, (tiles(rows, _LOOKS),), table, rows, row_stride(table), WIDTH=width, ROWS=_LOOKS,
                COLUMNS=columns, num_warps=_CLEARS,
            )
        ]  # fmt: skip
    axis, tokens = str(site.attrs["axis"]), ids.numel()
    sum_runs = bind(
        _sum_runs, (tokens, tiles(width, columns)), None, None, g, table, tokens, env.index(axis) * rows if axis else 0,
        rows, row_stride(g), row_stride(table), WIDTH=width, ADD=add, MARK=marks, ROWS=FORM.rows, COLUMNS=columns,
        num_warps=FORM.warps,
    )  # fmt: skip

    def run() -> None:
        sorted_ids, order = _sorted(ids.reshape(-1))
        for call in clear:
            call()
        sum_runs(ids=sorted_ids, order=order)

    return run


def _sorted(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in their order, and where each was."""
    short, order = ids.to(torch.int32), torch.empty_like(ids)  # half of the bits to sort by are half of the passes
    made = torch.empty_like(short)
    torch.sort(short, stable=True, out=(made, order))
    return made, order


EMBEDDING = {"embedding": TorchKernel(embedding, None, embedding_weight)}
