"""What updates parameters, by their role: which moments it keeps of each, and what it asks of their matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OptimizerName = Literal["adamw", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "muon")
Moment = Literal["mean", "square", "momentum"]

_MOMENTS: Mapping[OptimizerName, tuple[Moment, ...]] = MappingProxyType(
    {"adamw": ("mean", "square"), "muon": ("momentum",)}
)


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What moves the parameters of a bucket.

    adamw   each element by itself
    muon    each matrix as one: its momentum, made orthogonal by `steps` of Newton-Schulz
    """

    name: OptimizerName = "adamw"
    steps: int = 0

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Kept between steps, an element each for every element of a parameter."""
        return _MOMENTS[self.name]

    @property
    def by_matrix(self) -> bool:
        """Whether it needs whole matrices."""
        return self.name == "muon"


ADAMW = OptimizerKind()


@dataclass(frozen=True, slots=True)
class OptimizerKinds:
    """Of a run: one for matrices between hidden states, one for all else (tables, the head, norms, biases, routers)."""

    matrices: OptimizerKind = ADAMW
    rest: OptimizerKind = ADAMW

    def of(self, *, matrix: bool) -> OptimizerKind:
        """What moves a parameter. `matrix`: it is a matrix between hidden states."""
        return self.matrices if matrix else self.rest


PLAIN = OptimizerKinds()
