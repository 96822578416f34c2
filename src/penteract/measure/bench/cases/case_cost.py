"""GPU-seconds of a case, before it runs."""

from __future__ import annotations

from penteract.measure.schemas.sweep import SweepCase, SweepSettings

# From the start of processes to the first step is over: 20 to 40 s were seen on H200; on CPUs, with nothing to compile,
# 2 to 3 s, for one or two processes of a small model on two cores.
_START_S, _START_ON_CPUS_S = 30.0, 3.0


def start_seconds(settings: SweepSettings) -> float:
    """About how long a case of this sweep takes to start."""
    return _START_ON_CPUS_S if settings.on_cpus else _START_S


def gpu_seconds(case: SweepCase, settings: SweepSettings) -> float:
    """Predicted: the start and its steps, at most the time limit; without a predicted step the start alone."""
    seconds = start_seconds(settings) + (settings.warmup + settings.steps) * (case.predicted.step_s or 0.0)
    return case.ranks * min(seconds, case.limit_s)
