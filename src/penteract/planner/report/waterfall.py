"""From the ideal step to the predicted one, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penteract.planner.search.best import Timed
from penteract.readings.estimator import Estimator

_PS = 10**12
# What each part of a step is called on the way from ideal to predicted, and what it is.
STEPS: Mapping[str, tuple[str, str]] = {
    "ideal": ("Ideal", "The products that training needs, with half of attention's, at the GPU's dense peak."),
    "compute": ("Matmuls below peak", "Matrix products beyond their ideal: the rates of their shapes, recomputation, "
                "and what the slowest pipeline rank has more than others."),
    "attention": ("Attention below peak", "Attention beyond its ideal: the rate of its kernel, and recomputation."),
    "pointwise": ("Memory-bound ops", "Norms, activations, additions: they wait for the GPU's memory."),
    "launch": ("Launches", "Kernels that end before the host has launched the next."),
    "tensor": ("Exposed: tensor", "Collectives of tensor (and sequence) parallelism that no compute hides."),
    "context": ("Exposed: context", "Exchange of keys and values that no compute hides."),
    "expert": ("Exposed: expert", "All-to-alls of expert parallelism that no compute hides."),
    "data": ("Exposed: data", "Gathers and reductions of data parallelism (ZeRO) that no compute hides."),
    "pipeline": ("Bubble", "Waits for other pipeline ranks, and for their messages."),
    "update": ("Optimizer", "The update of parameters at the end of the step."),
    "host": ("Host", "Copies to and from the host's memory that no compute hides."),
}  # fmt: skip


class StepChange(NamedTuple):
    """A row of a waterfall: whole picoseconds, so that rows add up exactly."""

    name: str
    label: str
    about: str
    picoseconds: int


def predicted_parts(timed: Timed) -> dict[str, int]:
    """Picoseconds of each part of the predicted step on the rank that ends last. They sum to the step."""
    return {part: round(seconds * _PS) for part, seconds in timed.time.parts.items()}


def waterfall(prices: Estimator, timed: Timed) -> list[StepChange]:
    """The step from ideal to predicted: the ideal first, then what each part has more. The clock's times are whole
    picoseconds, so the rows sum to the step."""
    ideal = {part: round(seconds * _PS) for part, seconds in prices.ideal(timed.layout).items()}
    lost = {part: size - ideal.get(part, 0) for part, size in predicted_parts(timed).items()}
    found = {"ideal": sum(ideal.values()), **lost}
    return [StepChange(name, label, about, found[name]) for name, (label, about) in STEPS.items() if found.get(name)]
