"""Weights that travel as codes of FP8: their scales, and a shard's codes when it is gathered.

A weight has one scale, of its largest absolute value over the ranks of a stage. It changes when the weight does, so
ranks agree once, when a step begins; linears then read codes and scale, in whichever pass, and quantise the weight no
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.precision.fp8 import Fp8
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.quantise import TORCH, Quantiser, make_scales
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.fp8 import ALIGNED, quantise_workspace
from penteract.parallel.data import Bucket


class ShardValues(NamedTuple):
    """What this rank's shard holds of a weight: elements from `begin` on, [n]."""

    begin: int
    values: torch.Tensor


@dataclass(slots=True)
class QuantisedWeights:
    """`names`: the weights of all of a stage's ranks, in one order. `parts`: those of which this rank holds something.

    table   [n, ALIGNED] for a row of each weight, its scale the first
    scales  views of these, [1]
    """

    fp8: Fp8
    names: Sequence[str]
    parts: Mapping[str, ShardValues]
    device: torch.device
    quantiser: Quantiser = TORCH
    table: torch.Tensor = field(init=False)
    scales: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.table = torch.zeros(len(self.names), ALIGNED, device=self.device)
        self.scales = {name: row[:1] for name, row in zip(self.names, self.table.unbind(), strict=True)}

    def begin(self) -> None:
        """The largest values of what this rank holds of the weights, as they are now."""
        self.table.zero_()
        for name, part in self.parts.items():
            self.scales[name].copy_(torch.linalg.vector_norm(part.values, ord=torch.inf))

    def scale(self) -> None:
        """Make scales of the largest values, once ranks have agreed on them."""
        make_scales(self.fp8, self.fp8.operand, self.table)

    def put(self, b: Bucket, shard: range, whole: torch.Tensor) -> torch.Tensor:
        """Make a shard's codes where they lie in the whole bucket [size]; returns them, [shard_size]."""
        room = torch.empty(quantise_workspace(len(shard), self.quantiser.elementwise) // FLOAT, device=self.device)
        for q, at in zip(b.params, b.offsets, strict=True):
            if (part := self.parts.get(q.name)) is None:
                continue
            codes = whole[at + part.begin :][: len(part.values)].view(FORMATS[self.fp8.operand])
            self.quantiser.put_codes(self.fp8.operand, part.values, self.scales[q.name], codes, room)
        return whole[shard.start : shard.stop]
