"""How far a prediction is off, and what many such errors amount to: the one definition, for all that show errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median


def residual(measured: float | None, predicted: float | None) -> float | None:
    """(measured - predicted) / measured: 0.1 is a tenth more than predicted. None where one of them is not known."""
    return None if predicted is None or not measured else (measured - predicted) / measured


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSummary:
    """Of the absolute errors of `n` rows."""

    n: int
    mean: float
    median: float
    worst: float

    @staticmethod
    def of(errors: Iterable[float | None]) -> ErrorSummary | None:
        """Of those that are known. None without rows."""
        found = [abs(error) for error in errors if error is not None]
        if not found:
            return None
        return ErrorSummary(n=len(found), mean=mean(found), median=median(found), worst=max(found))
