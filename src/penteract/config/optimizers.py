"""Which optimizer updates which parameters, the moments that it keeps, and whether it needs whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

OptimizerName = Literal["adamw", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
Moment = Literal["mean", "square", "momentum"]

_MOMENTS: Mapping[OptimizerName, tuple[Moment, ...]] = MappingProxyType(
    {"adamw": ("mean", "square"), "muon": ("momentum",)}
)


class OptimizerKind(NamedTuple):
    """The optimizer of a bucket. A tuple, as it is part of the keys of buckets.

    adamw   updates each element by itself
    muon    updates whole matrices: by their momentum, made orthogonal in `steps` of Newton-Schulz
    """

    name: OptimizerName = "adamw"
    steps: int = 0

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments kept between steps, each of the parameter's size."""
        return _MOMENTS[self.name]

    @property
    def by_matrix(self) -> bool:
        """Whether it needs whole matrices."""
        return self.name == "muon"


ADAMW = OptimizerKind()


@dataclass(frozen=True, slots=True)
class OptimizerKinds:
    """The optimizers of a run: for matrices between hidden states, and for the rest (tables, head, norms, biases,
    routers).
    """

    matrices: OptimizerKind = ADAMW
    rest: OptimizerKind = ADAMW

    def of(self, *, matrix: bool) -> OptimizerKind:
        """The optimizer of a parameter. `matrix`: it is a matrix between hidden states."""
        return self.matrices if matrix else self.rest


PLAIN = OptimizerKinds()
