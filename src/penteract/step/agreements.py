"""The small sums of a step that no call asks for: numbers on which ranks agree before an action, or after the last.

Each is declared here once. A price counts it, a run sums the tensor of its name, and the walk says when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penteract.ops.bodies.body import FLOAT
from penteract.ops.bodies.fp8 import remembered
from penteract.step.program import Program
from penteract.units import Bytes

Name = Literal["scales of weights", "target tokens", "routed counts", "largest values", "norm and losses"]
OF_LINEAR = 3  # the largest of its x, its w and its gradient


@dataclass(frozen=True, slots=True)
class Agreement:
    """An all-reduce of `elements` numbers of `width` bytes, over the ranks of `axis`; over one rank it is nothing."""

    name: Name
    kind: Literal["sum", "max"]
    axis: str
    elements: int
    width: Bytes

    @property
    def size(self) -> Bytes:
        return self.elements * self.width


def at_begin(p: Program) -> tuple[Agreement, ...]:
    """Before the first action: what its calls read.

    Weights that travel as codes have a scale each, made of the largest of all shards; loss terms are sums over the
    whole batch, and are scaled by its targets.
    """
    scales = sum(map(remembered, p.coded)) // FLOAT
    return _some(
        Agreement("scales of weights", "max", "stage", scales, FLOAT),
        Agreement("target tokens", "sum", "dp", len(p.means), p.widths["index"]),
    )


def after_backward(p: Program) -> tuple[Agreement, ...]:
    """After the last action, before the norm: what a stage's micro-batches have counted and seen."""
    experts = p.model.moe.experts if p.model.moe is not None else 0
    return _some(
        Agreement("routed counts", "sum", "stage", len(p.balanced) * experts, p.widths["index"]),
        Agreement("largest values", "max", "stage", len(p.delayed) * OF_LINEAR, FLOAT),
    )


def totals(p: Program) -> Agreement:
    """The squared norm of the gradient, the loss's terms, and how many ranks were asked to stop: one vector."""
    return Agreement("norm and losses", "sum", "world", 2 + len(p.losses), p.widths["stat"])


def _some(*every: Agreement) -> tuple[Agreement, ...]:
    return tuple(a for a in every if a.elements)
