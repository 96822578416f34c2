"""Cross entropy and its gradient in one kernel: a row of logits is read for its sums; a part of it stays in registers.

The rest is read again, from its end on, so that what was read last is still in the cache. The gradient is written where
the logits were. `shared_rows.py` has the form that runs, in which several programs hold a row and read it once: on an
H200 it takes 9 % less time.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors
from penteract.engine.kernels.triton.fused_loss.shared_rows import SharedForm, losses_of, may_wait, shared_form
from penteract.engine.kernels.triton.strides import row_stride
from penteract.ops.tape import Site

_TOKENS = 4096  # that one program sums at a time
_LEAST = tl.constexpr(float("-inf"))
_HUGE = tl.constexpr(1e37)
_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class LossForm:
    """How the kernel is compiled: one program a row.

    kept     columns of a row that stay in registers between its sums and its gradient
    columns  of the others, at a time: they are read again, from the cache
    warps    of a program: few programs of many threads, whose rows the cache holds together
    leaves   what the gradient that was written is to the cache: evict_first makes room for what is read again
    stages   blocks of a row that are on their way at a time, through shared memory; 0: as the compiler orders them
    holds    the cache is asked to keep what the first reading brings, and to let it go after the second
    """

    kept: int = 16384
    columns: int = 16384
    warps: int = 32
    leaves: str = "evict_first"
    stages: int = 0
    holds: bool = False


FORM: LossForm | SharedForm | None = None  # None: `shared_form`, the fastest; benchmarks/loss_forms.py compares


@Bindable
def loss_and_gradient(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """logits [s, B, V], targets [s, B], g [] -> their negative log-likelihood [], and with z the z-loss []."""
    logits, targets, g = ins
    z, columns, tokens = float(site.attrs.get("z") or 0.0), logits.shape[-1], targets.numel()
    room = partial(torch.empty, len(outs), tokens, dtype=torch.float32, device=logits.device)
    form, stride = FORM or shared_form(columns), row_stride(logits)
    if isinstance(form, SharedForm) and may_wait(logits, form):
        put = losses_of(logits, stride, targets, g, z, form)
    else:
        put = _losses_of(logits, stride, targets, g, z, form if isinstance(form, LossForm) else LossForm())
    at_once = min(_TOKENS, triton.next_power_of_2(tokens))
    totals = [bind(_total, (1,), None, out, tokens, TOKENS=at_once, num_warps=16) for out in outs]

    def run() -> None:
        of_rows = room()
        put(of_rows)
        for total, part in zip(totals, of_rows, strict=True):
            total(parts=part)

    return run


def _losses_of(
    logits: torch.Tensor, stride: int, targets: torch.Tensor, g: torch.Tensor, z: float, form: LossForm
) -> Callable[[torch.Tensor], None]:
    """What `losses_of` gives, by one program a row."""
    columns, tokens = logits.shape[-1], targets.numel()
    widest = triton.next_power_of_2(columns)
    launch = bind(
        _rows, (tokens,), logits, targets, g, None, tokens, columns, stride, z, Z=bool(z),
        KEPT=min(form.kept, widest), COLUMNS=min(form.columns, widest), LEAVES=form.leaves, STAGES=form.stages or None,
        HOLDS=form.holds, num_warps=form.warps,
    )  # fmt: skip
    return lambda losses: launch(losses=losses)


@triton.jit
def _rows(
    logits, targets, g, losses, rows, columns, row_stride, z, Z: tl.constexpr, KEPT: tl.constexpr,
    COLUMNS: tl.constexpr, LEAVES: tl.constexpr, STAGES: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = "evict_last" if HOLDS else ""  # pyright: ignore[reportAssignmentType]
    LAST: tl.constexpr = "evict_first" if HOLDS else ""  # pyright: ignore[reportAssignmentType]
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    k, c = tl.arange(0, KEPT), tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    counts = target >= 0
    own = tl.load(line + target, counts, other=0.0).to(tl.float32)
    kept = tl.load(line + k, k < columns, other=_LEAST, eviction_policy="evict_first")
    # Shifted by the largest of its first columns, a row can be summed without a look at the others: one exponential an
    # element. Where that overflows, it is summed again, shifted by the largest of all.
    most = tl.max(kept.to(tl.float32), axis=0)
    total = _sum_of(line, kept, most, columns, c, KEPT, COLUMNS, STAGES, FIRST)
    if total > _HUGE:
        most_of = tl.full((COLUMNS,), _LEAST, tl.float32)
        for first in range(KEPT, columns, COLUMNS):
            most_of = tl.maximum(most_of, _read(line, first + c, columns, FIRST))
        most = tl.maximum(most, tl.max(most_of, axis=0))
        total = _sum_of(line, kept, most, columns, c, KEPT, COLUMNS, STAGES, FIRST)
    log_sum = most + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))
    factor = tl.where(counts, tl.load(g), 0.0)
    share = factor
    if Z:
        tl.store(losses + rows + row, tl.where(counts, z * log_sum * log_sum, 0.0))
        share = factor * (1.0 + 2.0 * z * log_sum)
    tl.debug_barrier()  # the target's logit has been read by all threads
    shift = log_sum * _LOG2E
    blocks = tl.cdiv(tl.maximum(columns - KEPT, 0), COLUMNS)
    for i in tl.range(blocks, num_stages=STAGES):
        at = KEPT + (blocks - 1 - i) * COLUMNS + c
        made = tl.exp2(_read(line, at, columns, LAST) * _LOG2E - shift) * share
        tl.store(line + at, made.to(logits.dtype.element_ty), at < columns, eviction_policy=LEAVES)
    made = tl.exp2(kept.to(tl.float32) * _LOG2E - shift) * share
    tl.store(line + k, made.to(logits.dtype.element_ty), k < columns, eviction_policy=LEAVES)
    tl.debug_barrier()  # the target's gradient has been written as all others
    made = tl.exp2(own * _LOG2E - shift) * share - factor
    tl.store(line + target, made.to(logits.dtype.element_ty), counts)


@triton.jit
def _read(line, at, columns, POLICY: tl.constexpr):
    return tl.load(line + at, at < columns, other=_LEAST, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _sum_of(
    line, kept, most, columns, c, KEPT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, POLICY: tl.constexpr
):
    """The sum of a row's exponentials, shifted by `most`."""
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.range(KEPT, columns, COLUMNS, num_stages=STAGES):
        sums += tl.exp(_read(line, first + c, columns, POLICY) - most)
    return tl.sum(sums, axis=0) + tl.sum(tl.exp(kept.to(tl.float32) - most), axis=0)


@triton.jit
def _total(parts, out, tokens, TOKENS: tl.constexpr):
    """In one program: the same order every time."""
    at = tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, tokens, TOKENS):
        total += tl.load(parts + first + at, first + at < tokens, other=0.0)
    tl.store(out, tl.sum(total, axis=0))
