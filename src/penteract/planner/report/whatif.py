"""What would have to change for the runner-up to win: one factor at a time, both layouts estimated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

from penteract.config.hardware import Cluster, Fabric
from penteract.config.layout import Layout
from penteract.planner.ask import Ask
from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed
from penteract.planner.search.grow import Make
from penteract.readings.estimator import Estimator
from penteract.schedule.registry import schedule_of

_REACH = 8.0  # the largest factor tried, up or down
_BISECTIONS = 4
_DOUBLINGS = (2, 4, 8)
_LONGER = (2, 4)


@dataclass(frozen=True, slots=True)
class Change:
    """With `factor` times `what`, the runner-up wins; None if it does not at any factor up to `tried`."""

    what: str
    factor: float | None
    tried: float = _REACH


def sentence(rival: str, changes: Sequence[Change]) -> str:
    """What would let `rival` win, and what would not."""
    wins = " or ".join(f"{c.what} ×{c.factor:.2g}" for c in changes if c.factor is not None)
    not_up_to = dict[float, list[str]]()
    for c in changes:
        if c.factor is None:
            not_up_to.setdefault(c.tried, []).append(c.what)
    fails = ", or ".join(f"{' or '.join(some)} up to ×{tried:g}" for tried, some in not_up_to.items())
    if not wins:
        return f"{rival} would not overtake #1 with {fails}."
    return f"{rival} would overtake #1 with {wins}" + (f", not with {fails}." if fails else ".")


def what_if(plan: Plan, first: Timed, rival: Timed, make: Make) -> list[Change]:
    """The factors at which `rival` overtakes `first`, for links, batch and sequence length. Only these two are
    compared; a third may be better there."""
    ask = plan.ask
    changes: list[Change] = []
    if ask.cluster.inside is not None:
        changes.append(
            Change("intra-node bandwidth", _bisect(lambda f: _ahead(_links(ask, f, 1.0), first, rival, make)))
        )
    if ask.cluster.between is not None and ask.cluster.gpus > ask.cluster.gpus_per_node:
        changes.append(
            Change("inter-node bandwidth", _bisect(lambda f: _ahead(_links(ask, 1.0, f), first, rival, make)))
        )
    changes.append(Change("batch size", _first(_batches(*_racers(ask, first, rival, make)))))
    if lengths := [n for n in _LONGER if ask.sequence_length * n <= ask.model.max_positions]:
        changes.append(Change("sequence length", _first(_lengths(ask, first, rival, make, lengths)), lengths[-1]))
    return changes


Racer = tuple[Estimator, Layout]


def _racers(ask: Ask, first: Timed, rival: Timed, make: Make) -> tuple[Racer, Racer]:
    """Both layouts, each with the estimator of the question in its precision."""
    made = {p: make(replace(ask, precision=p, also=())) for p in {first.estimate.precision, rival.estimate.precision}}
    return (made[first.estimate.precision], first.layout), (made[rival.estimate.precision], rival.layout)


def _ahead(ask: Ask, first: Timed, rival: Timed, make: Make) -> bool:
    return _wins(*_racers(ask, first, rival, make))


def _wins(first: Racer, rival: Racer) -> bool:
    """Whether the second is faster."""
    (a, one), (b, other) = first, rival
    return b.time(b.estimate(other)).seconds < a.time(a.estimate(one)).seconds


def _bisect(wins: Callable[[float], bool]) -> float | None:
    """The factor nearest to 1, on a log scale, at which `wins` holds. A side is searched if `wins` holds at its end."""
    found = [_border(wins, end) for end in (_REACH, 1 / _REACH) if wins(end)]
    return min(found, key=lambda factor: abs(log(factor)), default=None)


def _border(wins: Callable[[float], bool], far: float) -> float:
    """The factor between 1 and `far` from which `wins` holds."""
    near = 1.0
    for _ in range(_BISECTIONS):
        middle = sqrt(near * far)
        near, far = (near, middle) if wins(middle) else (middle, far)
    return far


def _links(ask: Ask, inside: float, between: float) -> Ask:
    faster: Cluster = replace(
        ask.cluster, inside=_times(ask.cluster.inside, inside), between=_times(ask.cluster.between, between)
    )  # fmt: skip
    return replace(ask, cluster=faster)


def _times(fabric: Fabric | None, factor: float) -> Fabric | None:
    if fabric is None:
        return None
    bus = tuple((kind, tuple((nodes, rate * factor) for nodes, rate in points)) for kind, points in fabric.bus)
    return replace(fabric, gb_per_second=fabric.gb_per_second * factor, bus=bus)


def _first(tries: Iterator[tuple[float, bool]]) -> float | None:
    return next((factor for factor, wins in tries if wins), None)


def _batches(first: Racer, rival: Racer) -> Iterator[tuple[float, bool]]:
    """Larger and smaller batches, by more or fewer accumulation steps."""
    for n in _DOUBLINGS:
        yield n, _wins(_accumulating(first, n, 1), _accumulating(rival, n, 1))
        whole = all(
            lay.gradient_accumulation_steps % (n * schedule_of(lay.schedule).round(lay.pp)) == 0
            for _, lay in (first, rival)
        )
        if whole:
            yield 1 / n, _wins(_accumulating(first, 1, n), _accumulating(rival, 1, n))


def _accumulating(racer: Racer, more: int, fewer: int) -> Racer:
    prices, layout = racer
    return prices, replace(layout, gradient_accumulation_steps=layout.gradient_accumulation_steps * more // fewer)


def _lengths(ask: Ask, first: Timed, rival: Timed, make: Make, factors: Sequence[int]) -> Iterator[tuple[float, bool]]:
    """Longer sequences."""
    for n in factors:
        yield n, _ahead(replace(ask, sequence_length=ask.sequence_length * n), first, rival, make)
