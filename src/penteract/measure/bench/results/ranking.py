"""A sweep's cases ranked by what was measured, beside what the plan said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from penteract.measure.schemas.sweep import CaseMeasurement, Sweep, SweepRow

FIRST = 3  # of the plan's cases, among which the measured best should be
CLOSE = 0.12  # of a predicted step that is right, or the row's spread if that is wider


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedRow:
    """A case that was measured. Errors are (measured - predicted) / measured; None: not predicted.

    place       by measured tokens a second and GPU, from 1; `planned` by predicted ones; None: not predicted
    time_error  of the step; `memory_error` of the bytes that the fullest rank allocates
    right       whether the step was predicted within `CLOSE`, or within the row's spread; None: not predicted
    """

    row: SweepRow
    measured: CaseMeasurement
    place: int
    planned: int | None
    time_error: float | None
    memory_error: float | None
    right: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanVerdict:
    """How good the plan was for a sweep. `right` of `predicted` cases with a predicted step were right.

    regret          how much less than the best the first reaches: 0.02 is 2 % of the best's tokens/s
    first, best     names of the plan's first among the cases whose speed counts, and of the measured best
    best_in_first   whether the measured best, or a case within noise of it, is among the plan's first `FIRST`
    time, memory    (mean, worst) of the errors' absolute values; None: nothing was predicted
    """

    predicted: int
    right: int
    regret: float | None
    first: str
    best: str
    best_in_first: bool | None
    time: tuple[float, float] | None
    memory: tuple[float, float] | None


def rank(sweep: Sweep) -> list[RankedRow]:
    """The cases whose speed counts, the fastest first."""
    rows = [(row, row.result.measured) for row in sweep.ranked if row.result]
    order = sorted(
        (row.case.name for row, _ in rows if row.case.predicted.tokens_per_s_per_gpu),
        key=lambda name: next(-(r.case.predicted.tokens_per_s_per_gpu or 0) for r, _ in rows if r.case.name == name),
    )
    places = {name: place for place, name in enumerate(order, 1)}
    return [_ranked(row, measured, place, places.get(row.case.name)) for place, (row, measured) in enumerate(rows, 1)]


def _ranked(row: SweepRow, measured: CaseMeasurement, place: int, planned: int | None) -> RankedRow:
    predicted = row.case.predicted
    time = None if predicted.step_s is None else (measured.step_s - predicted.step_s) / measured.step_s
    fullest = max(measured.allocated_bytes, default=0)
    memory = (fullest - predicted.allocated_bytes) / fullest if fullest else None
    right = None if time is None else abs(time) <= max(CLOSE, measured.spread)
    return RankedRow(row=row, measured=measured, place=place, planned=planned, time_error=time, memory_error=memory,
                     right=right)  # fmt: skip


def verdict(rows: Sequence[RankedRow]) -> PlanVerdict | None:
    """How good the plan was; None where nothing was measured."""
    if not rows:
        return None
    best, planned = rows[0], sorted((r for r in rows if r.planned), key=lambda r: r.planned or 0)
    first = planned[0] if planned else None
    return PlanVerdict(
        predicted=len(planned), right=sum(r.right or False for r in planned),
        regret=None if first is None else 1 - rate(first) / rate(best), first=first.row.case.name if first else "",
        best=best.row.case.name, best_in_first=any(as_good(r, best) for r in planned[:FIRST]) if planned else None,
        time=_mean_worst([r.time_error for r in rows]), memory=_mean_worst([r.memory_error for r in rows]),
    )  # fmt: skip


def rate(ranked: RankedRow) -> float:
    """Tokens a second and GPU."""
    return ranked.measured.tokens_per_s_per_gpu


def as_good(one: RankedRow, best: RankedRow) -> bool:
    """Whether a case is the best, or slower by less than the wider spread of the two."""
    return rate(one) >= rate(best) * (1 - max(one.measured.spread, best.measured.spread))


def _mean_worst(errors: Sequence[float | None]) -> tuple[float, float] | None:
    found = [abs(error) for error in errors if error is not None]
    return (fmean(found), max(found)) if found else None
