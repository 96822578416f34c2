"""The learning rate of a step: a linear warm-up, then the chosen decay. A pure function of the step."""

from __future__ import annotations

import math

from penteract.config.run import LearningRateSchedule


def rate(spec: LearningRateSchedule, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 1) of `steps`. `peak`: its largest value, `optimizer.learning_rate`."""
    if step <= spec.warmup_steps:
        return peak * step / spec.warmup_steps
    end = spec.end(steps)
    if spec.kind == "wsd":
        fall = max(1, round(spec.decay_fraction * end))
        done = max(0.0, (step - (end - fall)) / fall)
        return peak * (1 - (1 - spec.final_fraction) * min(1.0, done))
    done = (step - spec.warmup_steps) / max(1, end - spec.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if spec.kind == "cosine" else 1 - min(1.0, done)
    return peak * (spec.final_fraction + (1 - spec.final_fraction) * left)
