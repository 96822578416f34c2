"""What casts tensors to FP8 both ways round, and where the data go: `fp8_linear.py` is given the casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penteract.config.precision.fp8 import Format, Fp8
from penteract.engine.dtypes import FORMATS


class Fp8Data(NamedTuple):
    """Where the FP8 data of a tensor [rows, k] go, in Transformer Engine's terms: rowwise [rows, k]; columnwise
    [k, rows], the transpose. They have the dtype of their format. None: not needed."""

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None

    def part(self, begin: int, end: int) -> Fp8Data:
        """The data of rows `begin` to `end`: views, rowwise [end - begin, k] and columnwise [k, end - begin]."""
        return Fp8Data(
            None if self.rowwise is None else self.rowwise[begin:end],
            None if self.columnwise is None else self.columnwise[:, begin:end],
        )


class Slopes(NamedTuple):
    """What the gradients of gate and up, side by side [T, 2·F], are made of: both of them so [T, 2·F], and the gradient
    of SwiGLU's result [T, F]."""

    packed: torch.Tensor
    gradient: torch.Tensor


def typed(data: torch.Tensor, name: Format) -> torch.Tensor:
    """FP8 data, which a register has as bytes, in their format."""
    return data if data.dtype == FORMATS[name] else data.view(FORMATS[name])


PutLargest = Callable[[torch.Tensor], object]  # largest
PutFp8 = Callable[[torch.Tensor | None, Fp8Data], object]  # largest, into
PutSampled = Callable[[torch.Tensor, Fp8Data], object]  # two zeros, into


@dataclass(frozen=True, slots=True)
class Caster:
    """Casts tensors to FP8. Both are first given what is the same in all steps.

    largest_of  of x [rows, k]: what puts its largest absolute value, and what is in `largest` [1], into that
    fp8_of      of x and its scale [1]: what puts its data `into` their places; the scale is made of `largest`, or known
                where that is None
    overwrites  whether the second leaves the scale in `largest`
    """

    largest_of: Callable[[Any], PutLargest]
    fp8_of: Callable[[Fp8, Format, Any, torch.Tensor], PutFp8]
    overwrites: bool = True

    def put_largest(self, x: Any, largest: torch.Tensor) -> None:
        """Once."""
        self.largest_of(x)(largest)

    def put_fp8(
        self, fp8: Fp8, name: Format, x: Any, largest: torch.Tensor | None, scale: torch.Tensor, into: Fp8Data
    ) -> None:
        """Once."""
        self.fp8_of(fp8, name, x, scale)(largest, into)


class Casters(NamedTuple):
    """All casts to FP8, and what is fused with them.

    of_values       data of tensors
    of_slopes       data of what `Slopes` make, with or without making it
    sampled_slopes  of them and their scale: what puts their data `into` its places, by a scale from some of their rows
    put_glu         SwiGLU of a packed tensor [T, 2·F], into [T, F]; its largest value too, and of what is in `largest`
    whole           several matrices as one, where they lie behind each other
    """

    of_values: Caster
    of_slopes: Caster
    sampled_slopes: Callable[[Fp8, Format, Slopes, torch.Tensor], PutSampled]
    put_glu: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    whole: Callable[[Sequence[torch.Tensor]], torch.Tensor | None]
