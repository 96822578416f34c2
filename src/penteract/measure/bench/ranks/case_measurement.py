"""What ranks measured, as one row: the slowest rank sets each step, and a speed without a finite loss is void."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, quantiles

from penteract.measure.bench.ranks.timed_steps import RankMeasurement
from penteract.measure.schemas.sweep import CaseMeasurement, SweepCase

_FEW = 3  # losses at either end that are averaged


def measurement(
    case: SweepCase, ranks: Sequence[RankMeasurement], warmup: int, data: str, peak: float | None
) -> CaseMeasurement:
    """The row of a case. `warmup`: steps that are not timed; `peak`: FLOP/s of one device, None if it is not known."""
    steps = [max(one.seconds[n] for one in ranks) for n in range(len(ranks[0].seconds))]
    timed, losses = steps[warmup:], ranks[0].losses
    step = median(timed)
    of_peak = None if peak is None else step * case.ranks * peak
    return CaseMeasurement(
        tokens_per_s_per_gpu=case.tokens / step / case.ranks, step_s=step, spread=spread(timed), steps_s=tuple(timed),
        warmup_s=tuple(steps[:warmup]), losses=tuple(losses), loss_falls=falls(losses), void=void(losses),
        mfu=None if of_peak is None else case.model_flops / of_peak,
        mfu_causal=None if of_peak is None else case.model_flops_causal / of_peak,
        allocated_bytes=tuple(one.allocated for one in ranks),
        reserved_bytes=tuple(one.reserved for one in ranks if one.reserved is not None),
        device_bytes=tuple(one.device for one in ranks if one.device is not None), data=data,
    )  # fmt: skip


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


def void(losses: Sequence[float | None]) -> str:
    """Why a speed counts for nothing; empty: it counts."""
    bad = next((n for n, loss in enumerate(losses, 1) if loss is None), 0)
    return f"the loss is not finite at step {bad}" if bad else ""
