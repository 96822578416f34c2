"""Cross entropy and its gradient in one reading and one writing of the logits: several programs share a row.

Each program has a part of a row in registers. It reports its part's largest logit and sum of exponentials, waits for
what the others report of theirs, adds all up in the order of the parts, and writes the gradient where the logits were.

What a program reports is one number of 64 bits, written and read as a whole, in place of a number that none can report:
so it is its own signal, and nothing else has to be in order. Programs take parts in the order in which they start, by a
ticket. So those that wait do so for programs that run, or for the next that start; these do when the rows before are
done, if more programs run at a time than a row has parts: `may_wait` tells.
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
from penteract.ops.declarations.loss import row_part

_THREAD = 64  # columns of a thread
_LEAST = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_MISSING = tl.constexpr(-1)  # two floats with every bit set: computation makes other NaNs


@dataclass(frozen=True, slots=True)
class SharedForm:
    """How the kernel is compiled.

    columns  of a part: at most so many, a power of two
    warps    of a program
    """

    columns: int
    warps: int


def shared_form(columns: int) -> SharedForm:
    """The one that runs for rows of so many columns."""
    part = row_part(columns)
    return SharedForm(part, part // (32 * _THREAD))


def may_wait(logits: torch.Tensor, form: SharedForm) -> bool:
    """Whether programs where these logits are may wait for each other: the device has a multiprocessor for each part of
    a row, so that they run beside each other whatever else it does."""
    columns = logits.shape[-1]
    parts = triton.cdiv(columns, min(form.columns, triton.next_power_of_2(columns)))
    return not logits.is_cuda or parts <= torch.cuda.get_device_properties(logits.device).multi_processor_count


def one_by_one(logits: torch.Tensor) -> bool:
    """Whether an interpreter runs the programs. Tensors without numbers stand for those of a GPU."""
    return logits.is_cpu


def losses_of(
    logits: torch.Tensor, stride: int, targets: torch.Tensor, g: torch.Tensor, z: float, form: SharedForm
) -> Callable[[torch.Tensor], None]:
    """What puts each row's negative log-likelihood into losses [1, rows], with z its z-loss too: [2, rows]; and the
    gradient in place of the logits [s, B, V], whose rows are `stride` apart."""
    rows, columns = targets.numel(), logits.shape[-1]
    wide = min(form.columns, triton.next_power_of_2(columns))
    parts = triton.cdiv(columns, wide)
    # First: the last ticket.
    room = partial(torch.full, (1 + rows * parts,), -1, dtype=torch.int64, device=logits.device)
    # An interpreter runs one program after the other: there, all report before any of them waits.
    launches = [
        bind(
            _parts, (rows * parts,), logits, targets, g, None, None, rows, columns, stride, z, 1 - i * rows * parts,
            Z=bool(z), PARTS=parts, SLOTS=triton.next_power_of_2(parts), COLUMNS=wide, WRITES=writes,
            num_warps=form.warps,
        )
        for i, writes in enumerate((False, True) if one_by_one(logits) else (True,))
    ]  # fmt: skip

    def put(losses: torch.Tensor) -> None:
        shared = room()
        for launch in launches:
            launch(shared=shared, losses=losses)

    return put


@triton.jit
def _parts(
    logits, targets, g, shared, losses, rows, columns, stride, z, begin, Z: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    ticket = tl.atomic_add(shared, 1, sem="relaxed").to(tl.int32) + begin
    row, part = (ticket // PARTS).to(tl.int64), ticket % PARTS
    line, reports = logits + row * stride, shared + 1 + row * PARTS
    at = part * COLUMNS + tl.arange(0, COLUMNS)
    some = tl.load(line + at, at < columns, other=_LEAST, eviction_policy="evict_first")
    target = tl.load(targets + row)
    counts = target >= 0
    mine = tl.maximum(target, 0) // COLUMNS == part  # the first part has what an ignored target's row comes to
    own = tl.load(line + target, counts & mine, other=0.0).to(tl.float32)
    most = tl.max(some.to(tl.float32), axis=0)
    e = tl.exp2((some.to(tl.float32) - tl.where(most == _LEAST, 0.0, most)) * _LOG2E)
    tl.atomic_xchg(reports + part, _report(most, tl.sum(e, axis=0)), sem="relaxed")
    if WRITES:
        largest, total = _all_of(reports, PARTS, SLOTS)
        log_sum = largest + tl.log(total)
        factor = tl.where(counts, tl.load(g), 0.0)
        share = factor
        tl.store(losses + row, tl.where(counts, log_sum - own, 0.0), mine)
        if Z:
            tl.store(losses + rows + row, tl.where(counts, z * log_sum * log_sum, 0.0), mine)
            share = factor * (1.0 + 2.0 * z * log_sum)
        made = e * (tl.exp2((most - log_sum) * _LOG2E) * share)
        tl.store(line + at, made.to(logits.dtype.element_ty), at < columns, eviction_policy="evict_first")
        tl.debug_barrier()  # the target's gradient has been written as all others
        made = tl.exp2((own - log_sum) * _LOG2E) * share - factor
        tl.store(line + target, made.to(logits.dtype.element_ty), counts & mine)


@triton.jit
def _report(most, total):
    """Two floats as one number."""
    high, low = most.to(tl.int32, bitcast=True).to(tl.int64), total.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def _all_of(reports, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """What all parts of a row report, once they have: the largest logit, and the sum of exponentials shifted by it."""
    p = tl.arange(0, SLOTS)
    found = tl.load(reports + p, p < PARTS, other=0, volatile=True)
    while tl.max((found == _MISSING).to(tl.int32), axis=0) > 0:
        found = tl.load(reports + p, p < PARTS, other=0, volatile=True)
    most_of = tl.where(p < PARTS, (found >> 32).to(tl.int32).to(tl.float32, bitcast=True), _LEAST)
    totals = found.to(tl.int32).to(tl.float32, bitcast=True)
    largest = tl.max(most_of, axis=0)
    return largest, tl.sum(totals * tl.exp2((most_of - largest) * _LOG2E), axis=0)
