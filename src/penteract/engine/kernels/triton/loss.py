"""The loss in one pass over the logits for each of its steps: what `engine/kernels/loss.py` says in plain torch.

A row of logits has V columns of the vocabulary, those that lie here. What is wider than the logits is in registers.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.triton.strides import row_stride
from penteract.ops.tape import Site

_COLUMNS, _WARPS = 4096, 8  # of a row at a time; of a program: 16 elements of a thread
_TOKENS = 4096  # that one program sums at a time
_LEAST = tl.constexpr(float("-inf"))


@triton.jit
def _largest(logits, out, columns, row_stride, COLUMNS: tl.constexpr):
    """out [rows]: the largest of each row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    most = tl.full((COLUMNS,), _LEAST, tl.float32)
    for first in range(0, columns, COLUMNS):
        some = tl.load(logits + row * row_stride + first + c, first + c < columns, other=_LEAST)
        most = tl.maximum(most, some.to(tl.float32))
    tl.store(out + row, tl.max(most, axis=0))


@triton.jit
def _sums(logits, largest, targets, out, rows, columns, row_stride, begin, COLUMNS: tl.constexpr):
    """out [2, rows]: of exp(logit - largest), and the target's logit - largest where it is one of these columns."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    shift = tl.load(largest + row)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, columns, COLUMNS):
        some = tl.load(logits + row * row_stride + first + c, first + c < columns, other=_LEAST)
        total += tl.exp(some.to(tl.float32) - shift)
    target = tl.load(targets + row) - begin
    own = (target >= 0) & (target < columns)
    logit = tl.load(logits + row * row_stride + target, own, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0))
    tl.store(out + rows + row, tl.where(own, logit - shift, 0.0))


@triton.jit
def _likelihood(sums, largest, targets, loss, log_sums, z_loss, tokens, z, TOKENS: tl.constexpr):
    """Of all tokens, in one program. z_loss: None where there is none."""
    at = tl.arange(0, TOKENS)
    total, squares = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for first in range(0, tokens, TOKENS):
        here = first + at < tokens
        log_total = tl.log(tl.load(sums + first + at, here, other=1.0))
        target = tl.load(sums + tokens + first + at, here, other=0.0)
        log_sum = log_total + tl.load(largest + first + at, here, other=0.0)
        counts = tl.where(tl.load(targets + first + at, here, other=-1) >= 0, 1.0, 0.0)
        tl.store(log_sums + first + at, log_sum, here)
        total += (log_total - target) * counts
        squares += log_sum * log_sum * counts
    tl.store(loss, tl.sum(total, axis=0))
    if z_loss is not None:
        tl.store(z_loss, tl.sum(squares, axis=0) * z)


@triton.jit
def _gradients(
    logits, log_sums, targets, g, out, columns, row_stride, out_stride, begin, z, Z: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """(softmax·(1 + 2·z·log-sum-exp) - onehot)·g, which may lie where the logits were; zero for ignored targets."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target, log_sum = tl.load(targets + row), tl.load(log_sums + row)
    factor = tl.where(target >= 0, tl.load(g), 0.0)
    p = tl.exp(tl.load(logits + row * row_stride + c, c < columns, other=0.0).to(tl.float32) - log_sum)
    if Z:
        p = p * (1.0 + 2.0 * z * log_sum)
    made = (p - tl.where(c == target - begin, 1.0, 0.0)) * factor
    tl.store(out + row * out_stride + c, made.to(out.dtype.element_ty), c < columns)


def _columns(n: int) -> tuple[int, dict[str, int]]:
    """How many columns a program takes at a time."""
    wide = min(_COLUMNS, triton.next_power_of_2(n))
    return wide, {"COLUMNS": wide, "num_warps": _WARPS}


def _begin(env: Env, site: Site, columns: int) -> int:
    """The first column of the vocabulary that is here."""
    return env.index(str(site.attrs["axis"])) * columns


def row_max(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The largest logit of each token: [S, B, V/tp] -> [S, B]."""
    n = ins[0].shape[-1]
    _largest[(outs[0].numel(),)](ins[0], outs[0], n, row_stride(ins[0]), **_columns(n)[1])


def exp_sum(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Of each token, the sum of exp(logit - largest) and the target's logit: [2, S, B]."""
    logits, largest, targets = ins
    rows, n = largest.numel(), logits.shape[-1]
    _sums[(rows,)](
        logits, largest, targets, outs[0], rows, n, row_stride(logits), _begin(env, site, n), **_columns(n)[1]
    )


def negative_log_likelihood(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The loss's sum over targets [], the log-sum-exp [S, B] and, where z is set, the z-loss."""
    sums, largest, targets = ins
    z, tokens = site.attrs.get("z", 0.0), targets.numel()
    _likelihood[(1,)](
        sums, largest, targets, outs[0], outs[1], outs[2] if z else None, tokens, float(z),
        TOKENS=min(_TOKENS, triton.next_power_of_2(tokens)), num_warps=16,
    )  # fmt: skip


def cross_entropy_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """softmax - target, scaled: [S, B, V/tp]."""
    _put_gradients(env, site, ins, outs[0])


def logits_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """The same, written over the logits."""
    _put_gradients(env, site, ins, ins[0])


def _put_gradients(env: Env, site: Site, ins: Tensors, out: torch.Tensor) -> None:
    logits, log_sums, targets, g = ins
    z, n = site.attrs.get("z", 0.0), logits.shape[-1]
    wide, shape = _columns(n)
    _gradients[(targets.numel(), triton.cdiv(n, wide))](
        logits, log_sums, targets, g, out, n, row_stride(logits), row_stride(out), _begin(env, site, n), float(z),
        Z=bool(z), **shape,
    )  # fmt: skip


LOSS = {
    "row_max": TorchKernel(row_max),
    "exp_sum": TorchKernel(exp_sum),
    "negative_log_likelihood": TorchKernel(negative_log_likelihood),
    "cross_entropy_gradient": TorchKernel(cross_entropy_gradient),
    "logits_gradient": TorchKernel(logits_gradient),
}
