"""Weights that are all-gathered in FP8: their scales, and the quantisation of a shard before its all-gather.

A weight has one scale, from its amax over the ranks of a stage. It changes only when the weight does, so ranks agree on
it once, at the beginning of a step. Linear layers then read quantised data and scale in all passes, and do not quantise
the weight again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.precision.fp8 import Fp8
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.quantised.quantise import TORCH, Quantiser, make_scales
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import ALIGNED, quantise_workspace
from penteract.parallel.data import Bucket


class ShardValues(NamedTuple):
    """The part of a weight in this rank's shard: elements from `begin` on, [n]."""

    begin: int
    values: torch.Tensor


@dataclass(slots=True)
class QuantisedWeights:
    """`names`: the weights of a stage, in the same order on all its ranks. `parts`: those that this rank's shards hold.

    table   [n, ALIGNED]: a row for each weight; the first element is its scale
    scales  views of these elements, [1]
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
        """Put the amax of this rank's parts of the weights into the table."""
        self.table.zero_()
        for name, part in self.parts.items():
            self.scales[name].copy_(torch.linalg.vector_norm(part.values, ord=torch.inf))

    def scale(self) -> None:
        """Turn the amax values into scales, once ranks have agreed on them."""
        make_scales(self.fp8, self.fp8.operand, self.table)

    def quantise_shard(self, b: Bucket, shard: range, whole: torch.Tensor) -> torch.Tensor:
        """Quantise a shard into its place in the whole bucket [size]; returns that part, [shard_size]."""
        workspace = torch.empty(quantise_workspace(len(shard), self.quantiser.elementwise) // FLOAT, device=self.device)
        for q, at in zip(b.params, b.offsets, strict=True):
            if (part := self.parts.get(q.name)) is None:
                continue
            out = whole[at + part.begin :][: len(part.values)].view(FORMATS[self.fp8.operand])
            self.quantiser.quantise_into(self.fp8.operand, part.values, self.scales[q.name], out, workspace)
        return whole[shard.start : shard.stop]
