"""A sweep's cases ranked by what was measured, beside what the plan said of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from penteract.measure.results.residual import ErrorSummary, residual
from penteract.measure.schemas.sweep import Sweep

FIRST = 3  # of the plan's cases, among which the measured best should be
CLOSE = 0.12  # of a predicted step that is right, or the row's spread if that is wider
VAGUE = 0.25  # a spread from which a case is not ranked where it hides a difference of more than `CLOSE`


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseNumbers:
    """What is ranked of a case whose speed counts. None: not predicted, or not measured.

    rate             tokens a second and GPU
    spread           of its timed steps, as a share
    allocated_bytes  of the fullest rank
    """

    name: str
    rate: float
    step_s: float | None = None
    spread: float = 0.0
    allocated_bytes: float | None = None
    predicted_rate: float | None = None
    predicted_step_s: float | None = None
    predicted_allocated_bytes: float | None = None


def numbers_of(sweep: Sweep) -> list[CaseNumbers]:
    """The cases whose speed counts, in the sweep's order."""
    return [
        CaseNumbers(
            name=row.case.name, rate=measured.tokens_per_s_per_gpu, step_s=measured.step_s, spread=measured.spread,
            allocated_bytes=max(measured.allocated_bytes, default=None),
            predicted_rate=predicted.tokens_per_s_per_gpu, predicted_step_s=predicted.step_s,
            predicted_allocated_bytes=predicted.allocated_bytes,
        )
        for row in sweep.rows if row.counts and row.result
        for measured, predicted in [(row.result.measured, row.case.predicted)]
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedCase:
    """A case that was measured. Errors are residuals, as shares of the measurement; None: not predicted.

    place       by measured tokens a second and GPU, from 1; `planned` by predicted ones; None: not predicted
    vague       its timed steps are too few to rank it: their spread would tie it with cases of quite other speeds. Such
                cases come last, and tie with no other
    tied        the place of the first case that it is not slower than by more than noise: its own, if there is none
    time_error  of the step; `memory_error` of the bytes that the fullest rank allocates
    right       whether the step was predicted within `CLOSE`, or within the row's spread; None: not predicted
    """

    case: CaseNumbers
    place: int
    tied: int
    vague: bool
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


def rank(cases: Iterable[CaseNumbers]) -> list[RankedCase]:
    """The cases, the fastest first; then those with too few steps to rank."""
    every = sorted(cases, key=lambda case: -case.rate)
    rates = [case.rate for case in reversed(every)]
    vague = {case.name for case in every if case.spread >= VAGUE and _hides(case, rates)}
    order = sorted(every, key=lambda case: case.name in vague)
    ties, first = list[int](), 0
    for i, case in enumerate(order):
        first = first if case.name not in vague and _as_good(case, order[first]) else i
        ties.append(first + 1)
    planned = sorted(range(len(order)), key=lambda i: -(order[i].predicted_rate or 0.0))
    places = {i: place for place, i in enumerate((i for i in planned if order[i].predicted_rate), 1)}
    return [_ranked(case, i + 1, ties[i], places.get(i), vague=case.name in vague) for i, case in enumerate(order)]


def _ranked(case: CaseNumbers, place: int, tied: int, planned: int | None, *, vague: bool) -> RankedCase:
    time = residual(case.step_s, case.predicted_step_s)
    memory = residual(case.allocated_bytes, case.predicted_allocated_bytes)
    right = None if time is None else abs(time) <= max(CLOSE, case.spread)
    return RankedCase(
        case=case,
        place=place,
        tied=tied,
        vague=vague,
        planned=planned,
        time_error=time,
        memory_error=memory,
        right=right,
    )


def verdict(rows: Sequence[RankedCase]) -> PlanVerdict | None:
    """How good the plan was; None where nothing was measured."""
    if not rows:
        return None
    best, planned = rows[0], sorted((r for r in rows if r.planned), key=lambda r: r.planned or 0)
    sure = [r for r in planned if r.vague == best.vague]  # as good a measurement as the best's
    first = sure[0] if sure else None
    return PlanVerdict(
        predicted=len(planned), right=sum(r.right or False for r in planned),
        regret=None if first is None else 1 - first.case.rate / best.case.rate, first=first.case.name if first else "",
        best=best.case.name,
        best_in_first=any(_as_good(r.case, best.case) for r in planned[:FIRST] if r in sure) if sure else None,
        time=_mean_worst(r.time_error for r in rows), memory=_mean_worst(r.memory_error for r in rows),
    )  # fmt: skip


def _as_good(one: CaseNumbers, best: CaseNumbers) -> bool:
    """Whether a case is the best, or slower by less than the wider spread of the two."""
    return one.rate >= best.rate * (1 - max(one.spread, best.spread))


def _hides(case: CaseNumbers, rates: Sequence[float]) -> bool:
    """Whether the spread of a case would tie it with one that is not `CLOSE`. `rates`: of all, ascending."""
    least, near = case.rate * (1 - case.spread), case.rate * (1 - CLOSE)
    if bisect_left(rates, least) < bisect_left(rates, near):
        return True
    far, most = case.rate / (1 - CLOSE), case.rate / (1 - case.spread) if case.spread < 1 else inf
    return bisect_right(rates, far) < bisect_right(rates, most)


def _mean_worst(errors: Iterable[float | None]) -> tuple[float, float] | None:
    found = ErrorSummary.of(errors)
    return (found.mean, found.worst) if found else None
