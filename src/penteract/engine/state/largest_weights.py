"""The largest absolute value of each weight that is cast to FP8 once, kept from the update that made it to the next.

A cast needs it before it reads the weight. The update has each new weight in registers, so its kernel finds the largest
on its way. What no kernel finds is found by a pass after the update, and all are before the first step of a process. A
maximum has one value in any order, so all these ways have the same bits.

Weights that are merged share one value, as they share one scale. All of it stays on the device, at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.kernels.quantised.fp8_linear import put_largest
from penteract.engine.kernels.quantised.largest_rows import LargestRows
from penteract.ops.declarations.quantised.fp8 import ALIGNED
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket
from penteract.parallel.known_weights import found_by_kernel


@dataclass(slots=True)
class LargestWeights:
    """Of the linear layers of a rank.

    weights  local rectangles of parameters, by name
    first    weight -> the first of those that it shares a value with, which names the value
    buckets  of the rank
    table    [n, ALIGNED]: a row for each value, in the order of the buckets
    values   the first elements of the rows, [1]
    rows     by bucket, those whose values its update's kernel finds
    found    whether the values are those of the weights as they are now
    """

    weights: Mapping[str, torch.Tensor]
    first: Mapping[str, str]
    buckets: Sequence[Bucket]
    device: torch.device
    table: torch.Tensor = field(init=False)
    values: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor], init=False)
    rows: dict[int, LargestRows] = field(default_factory=dict[int, LargestRows], init=False)
    found: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.table = torch.zeros(len({*self.first.values()}), ALIGNED, device=self.device)
        for number, b in enumerate(self.buckets):
            begin = len(self.values)
            for name in [w.value for w in b.known_weights if w.value not in self.values]:
                self.values[name] = self.table[len(self.values)][:1]
            if found_by_kernel(b.known_weights, b.optimizer_kind):
                spans = [(w.begin, w.end) for w in b.known_weights]
                self.rows[number] = LargestRows.of(self.table[begin : len(self.values)], spans)

    @staticmethod
    def of(
        sites: Iterable[Site], parameters: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], device: torch.device
    ) -> LargestWeights:
        """Those of the weights of these linear layers; weights of one product share a value."""
        first = {name: site.params[0] for site in sites for name in site.params}
        return LargestWeights({name: parameters[name] for name in first}, first, buckets, device)

    def begin(self) -> None:
        """Find all of them, unless the last update has."""
        if not self.found:
            self.table[:, 0].zero_()
            self._find(self.weights)
            self.found = True

    def forget(self) -> None:
        """Something but an update has set the weights."""
        self.found = False

    def begin_update(self, good: torch.Tensor) -> None:
        """The updates that follow find them anew. `good` []: 1; 0 if they leave the weights as they are, and with them
        their values."""
        self.table[:, 0].masked_fill_(good > 0, 0)

    def end_update(self, bucket: int, *, by_kernel: bool) -> None:
        """Find what the update of a bucket has not found. `by_kernel`: it was one that finds what it can."""
        if not (by_kernel and bucket in self.rows):
            self._find(name for w in self.buckets[bucket].known_weights for name in w.names)

    def _find(self, names: Iterable[str]) -> None:
        for name in names:
            put_largest(self.weights[name], self.values[self.first[name]])
