"""A layout that was measured, beside what today's planner predicts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from penteract.config.layout import Layout
from penteract.measure.results.residual import residual
from penteract.readings.estimator import Estimator
from penteract.units import GIB

Quantity = Literal["allocated", "reserved", "device", "step"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
ROUNDING = 2e-4  # of an error: the record has four digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """Of one layout, in GiB and milliseconds. None: not measured, or not predicted.

    allocated  tensors on the fullest rank; `reserved` by torch's allocator there, `device` in use on its device
    step       an optimizer step
    """

    allocated: float | None = None
    reserved: float | None = None
    device: float | None = None
    step: float | None = None

    @staticmethod
    def of(estimator: Estimator, layout: Layout) -> Amounts:
        """What is predicted today. Reserved memory and the device's are not predicted."""
        estimate = estimator.estimate(layout)
        return Amounts(allocated=estimate.allocated / GIB, step=1e3 * estimator.time(estimate).seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow:
    """A case of a record or of a sweep, its `group`. `same_program`: what was measured is the program that is planned
    today; False where the engine has changed since, so that the row tells how it changed too."""

    group: str
    name: str
    predicted: Amounts
    measured: Amounts
    same_program: bool = True

    def error(self, quantity: Quantity) -> float | None:
        """Predicted over measured, less 1; None where one of them is not there."""
        found = residual(getattr(self.measured, quantity), getattr(self.predicted, quantity))
        return None if found is None else 0.0 - found

    @property
    def errors(self) -> dict[Quantity, float]:
        """The errors that there are, with four digits."""
        found: dict[Quantity, float] = {}
        for quantity in QUANTITIES:
            if (error := self.error(quantity)) is not None:
                found[quantity] = round(error, 4)
        return found


Baseline = Mapping[str, Mapping[str, Mapping[Quantity, float]]]  # group -> row -> quantity -> error


def worse_than(baseline: Baseline, rows: Iterable[AccuracyRow]) -> list[str]:
    """A line for each error that has grown by more than rounding: row, quantity, before, now."""
    return [
        f"{row.group}: {name}: {quantity}: {100 * before:+.2f} % before, {100 * now:+.2f} % now"
        for name, row in _named(rows)
        for quantity, now in row.errors.items()
        if (before := baseline.get(row.group, {}).get(name, {}).get(quantity)) is not None
        and abs(now) > abs(before) + ROUNDING
    ]  # fmt: skip


def baseline_of(rows: Iterable[AccuracyRow]) -> dict[str, dict[str, Mapping[Quantity, float]]]:
    """The errors of today, to compare with later."""
    found: dict[str, dict[str, Mapping[Quantity, float]]] = {}
    for name, row in _named(rows):
        found.setdefault(row.group, {})[name] = row.errors
    return found


def _named(rows: Iterable[AccuracyRow]) -> Iterator[tuple[str, AccuracyRow]]:
    """Each row with a name that no other of its group has: sweeps of several models may give two cases the same."""
    seen = Counter[tuple[str, str]]()
    for row in rows:
        seen[row.group, row.name] += 1
        again = seen[row.group, row.name]
        yield (row.name if again == 1 else f"{row.name} ({again})"), row
