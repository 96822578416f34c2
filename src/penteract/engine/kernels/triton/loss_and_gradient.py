"""Cross entropy and its gradient in one kernel: a row of logits is read for its sums, then again, from its end on, so
that what was read last is still in the cache; its gradient is written where it lay."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.kernel import Env, Tensors
from penteract.engine.kernels.triton.strides import row_stride
from penteract.ops.tape import Site

_COLUMNS, _WARPS = 16384, 32  # of a row at a time; few programs of many threads, whose rows the cache holds together
_TOKENS = 4096  # that one program sums at a time
_LEAST = tl.constexpr(float("-inf"))
_HUGE = tl.constexpr(1e37)


def loss_and_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """logits [s, B, V], targets [s, B], g [] -> their negative log-likelihood [], and with z the z-loss []."""
    logits, targets, g = ins
    z, columns, tokens = float(site.attrs.get("z") or 0.0), logits.shape[-1], targets.numel()
    of_rows = torch.empty(len(outs), tokens, dtype=torch.float32, device=logits.device)
    _rows[(tokens,)](
        logits, targets, g, of_rows, tokens, columns, row_stride(logits), z, Z=bool(z),
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(columns)), num_warps=_WARPS,
    )  # fmt: skip
    for out, part in zip(outs, of_rows, strict=True):
        _total[(1,)](part, out, tokens, TOKENS=min(_TOKENS, triton.next_power_of_2(tokens)), num_warps=16)


@triton.jit
def _rows(logits, targets, g, losses, rows, columns, row_stride, z, Z: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    c = tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    counts = target >= 0
    own = tl.load(line + target, counts, other=0.0).to(tl.float32)
    # Shifted by the largest of its first columns, a row can be summed without a look at the others: one exponential an
    # element. Where that overflows, it is summed again, shifted by the largest of all.
    most = tl.max(tl.load(line + c, c < columns, other=_LEAST).to(tl.float32), axis=0)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, columns, COLUMNS):
        some = tl.load(line + first + c, first + c < columns, other=_LEAST).to(tl.float32)
        sums += tl.exp(some - most)
    total = tl.sum(sums, axis=0)
    if total > _HUGE:
        most_of = tl.full((COLUMNS,), _LEAST, tl.float32)
        for first in range(0, columns, COLUMNS):
            some = tl.load(line + first + c, first + c < columns, other=_LEAST).to(tl.float32)
            most_of = tl.maximum(most_of, some)
        most = tl.max(most_of, axis=0)
        sums = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, columns, COLUMNS):
            some = tl.load(line + first + c, first + c < columns, other=_LEAST).to(tl.float32)
            sums += tl.exp(some - most)
        total = tl.sum(sums, axis=0)
    log_sum = most + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))
    factor = tl.where(counts, tl.load(g), 0.0)
    share = factor
    if Z:
        tl.store(losses + rows + row, tl.where(counts, z * log_sum * log_sum, 0.0))
        share = factor * (1.0 + 2.0 * z * log_sum)
    tl.debug_barrier()  # the target's logit has been read by all threads
    blocks = tl.cdiv(columns, COLUMNS)
    for i in range(blocks):
        at = (blocks - 1 - i) * COLUMNS + c
        some = tl.load(line + at, at < columns, other=_LEAST).to(tl.float32)
        made = tl.exp(some - log_sum) * share - tl.where(at == target, factor, 0.0)
        tl.store(line + at, made.to(logits.dtype.element_ty), at < columns)


@triton.jit
def _total(parts, out, tokens, TOKENS: tl.constexpr):
    """In one program: the same order every time."""
    at = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, tokens, TOKENS):
        total += tl.load(parts + first + at, first + at < tokens, other=0.0)
    tl.store(out, tl.sum(total, axis=0))
