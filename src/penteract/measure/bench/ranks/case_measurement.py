"""What ranks measured, as one row: the slowest rank sets each step, and a speed without a finite loss is void."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean, median, quantiles

from penteract.measure.bench.ranks.timed_steps import RankMeasurement
from penteract.measure.schemas.sweep import CaseMeasurement, SweepCase

_FEW = 3  # losses at either end that are averaged


def measurement(
    case: SweepCase, ranks: Sequence[RankMeasurement], warmup: int, data: str, peak: float | None, even: int = 0
) -> CaseMeasurement:
    """The row of a case. `warmup`: steps that are not timed; `peak`: FLOP/s of one device, None if it is not known;
    `even`: rows that a rank's experts get of a micro-batch where routing is even."""
    steps = [max(one.seconds[n] for one in ranks) for n in range(len(ranks[0].seconds))]
    timed, losses = steps[warmup:], ranks[0].losses
    step = median(timed)
    of_peak = None if peak is None else step * case.ranks * peak
    return CaseMeasurement(
        tokens_per_s_per_gpu=case.tokens / step / case.ranks, step_s=step, spread=spread(timed), steps_s=tuple(timed),
        warmup_s=tuple(steps[:warmup]), losses=tuple(losses), loss_falls=falls(losses),
        void=void(losses, ranks[0].exact_steps),
        mfu=None if of_peak is None else case.model_flops / of_peak,
        mfu_causal=None if of_peak is None else case.model_flops_causal / of_peak,
        allocated_bytes=tuple(one.allocated for one in ranks),
        reserved_bytes=tuple(one.reserved for one in ranks if one.reserved is not None),
        device_bytes=tuple(one.device for one in ranks if one.device is not None), data=data,
        routed_rows=tuple(tuple(one.routed[min(1, len(one.routed) - 1)]) for one in ranks)
        if any(any(one.routed) for one in ranks) else (),
        imbalance=imbalance([one.routed[warmup:] for one in ranks], even),
    )  # fmt: skip


def imbalance(routed: Sequence[Sequence[Sequence[int]]], even: int) -> float:
    """Rows by rank, step and exchange -> those of the rank with the most over `even`, on average over steps and
    exchanges; 1 where none are exchanged. All wait for that rank. Pipeline stages are compared place by place."""
    most = [max(rows) for steps in zip(*routed, strict=True) for rows in zip_longest(*steps, fillvalue=0)]
    return fmean(most) / even if most else 1.0


def spread(steps: Sequence[float]) -> float:
    """(90th - 10th percentile) / median."""
    tenths = quantiles(steps, n=10, method="inclusive") if len(steps) > 1 else [steps[0]]
    return (tenths[-1] - tenths[0]) / median(steps)


def falls(losses: Sequence[float | None]) -> bool:
    """Whether the mean of the last losses is below that of the first."""
    few = min(_FEW, len(losses) // 2)
    first, last = losses[:few], losses[len(losses) - few :]
    finite = [loss for loss in (*first, *last) if loss is not None]
    return few > 0 and len(finite) == 2 * few and fmean(finite[few:]) < fmean(finite[:few])


def void(losses: Sequence[float | None], exact_steps: Sequence[int] = ()) -> str:
    """Why a speed counts for nothing; empty: it counts. `exact_steps`: as of `RankMeasurement`."""
    if bad := next((n for n, loss in enumerate(losses, 1) if loss is None), 0):
        return f"the loss is not finite at step {bad}"
    if not exact_steps:
        return ""
    some = f"{len(exact_steps)} of {len(losses)} steps, the first of them {exact_steps[0]}, had exact rows of experts"
    return f"{some}, as copies did not fit their blocks: raise parallel.capacity_percent"
