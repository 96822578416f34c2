"""What follows the sum over ranks at the end of a step, as one kernel of one program: some forty numbers, for which
plain torch launches some fifty kernels, `engine/executor/executor.py` and `engine/optim/optimizer.py`. It computes the
same, with the same roundings.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.step import all_reduces

_DIGITS, _BITS = tl.constexpr(all_reduces.DIGITS), tl.constexpr(all_reduces.BITS)


@triton.jit
def end_step(
    totals, latch, done, step, rate, numbers, factors, counts, largest, mean, square, clip, values,
    LOSSES: tl.constexpr, MEANS: tl.constexpr, CLIP: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """In place, all fp32 but for fp64 of step, rate, done and numbers, and int64 of counts:

    totals   what ranks have summed: squared norm, LOSSES, stop, digits of the next step's MEANS counts
    latch    []: NaN once no later step may change anything
    done     []: the last step whose update is in the state
    numbers  [4]: weight decay, an unused one, beta1 and beta2 to the power of the step
    factors  [7]: `Factors`, written; mean, square: 1 - beta1, 1 - beta2; clip: the norm to clip to, with CLIP
    counts   [MEANS], of the next step; None if it counts them itself
    largest  the first of `values` largest values of weights, each in a row of four; None: there are none
    """
    norm = tl.load(totals)
    for i in tl.static_range(LOSSES):  # a loss that is not finite skips the update too
        norm += tl.load(totals + 1 + i) * 0
    norm += tl.load(latch)
    tl.store(totals, norm)
    finite = norm - norm == 0
    good = tl.where(finite, 1.0, 0.0)
    clipped = 1.0
    if CLIP:
        clipped = tl.minimum(tl.div_rn(1.0 + norm * 0, tl.sqrt_rn(norm) + 1e-6) * clip, 1.0)
    now, learned = tl.load(step), tl.load(rate)
    tl.store(factors, good)
    tl.store(factors + 1, tl.where(finite, clipped, 0.0))
    tl.store(factors + 2, good * mean)
    tl.store(factors + 3, 1 - good * square)
    tl.store(factors + 4, tl.sqrt(1 - tl.load(numbers + 3)).to(tl.float32))
    tl.store(factors + 5, 1 - good * (learned * tl.load(numbers)).to(tl.float32))
    tl.store(factors + 6, good * (learned / (1 - tl.load(numbers + 2))).to(tl.float32))
    tl.store(done, tl.where(finite, now, tl.load(done)))
    stopped = tl.load(totals + 1 + LOSSES) > 0
    tl.store(latch, tl.where(stopped, float("nan"), tl.load(latch) + norm * 0))
    if counts is not None:
        for m in tl.static_range(MEANS):
            digits, count = totals + 2 + LOSSES + m * _DIGITS, tl.zeros((), tl.int64)
            for i in tl.static_range(_DIGITS):
                count += tl.load(digits + i).to(tl.int64) << _BITS * i
            tl.store(counts + m, count)
    if largest is not None:
        at = tl.arange(0, VALUES)
        tl.store(largest + at * 4, tl.zeros((VALUES,), tl.float32), at < tl.where(finite, values, 0))
