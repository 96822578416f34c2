"""GPU-seconds of a case, before it runs."""

from __future__ import annotations

from penteract.measure.schemas.sweep import SweepCase, SweepSettings

START_S = 30.0  # from the start of processes to the first step is over: 20 to 40 s were seen on H200


def gpu_seconds(case: SweepCase, settings: SweepSettings) -> float:
    """Predicted: the start and its steps, at most the time limit; without a predicted step the start alone."""
    seconds = START_S + (settings.warmup + settings.steps) * (case.predicted.step_s or 0.0)
    return case.ranks * min(seconds, case.limit_s)
