"""The largest absolute value of each weight that is cast to FP8 once, kept from the update that made it to the next.

A cast needs it before it reads the weight. The update has each new weight in registers, so its kernel finds the largest
on its way. What no kernel finds is found by a pass after the update, and all are before the first step of a process. A
maximum has one value in any order, so all these ways have the same bits.

Weights that are merged share one value, as they share one scale. All of it stays on the device, at fixed addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.kernels.quantised.fp8_linear import put_largest
from penteract.engine.kernels.quantised.largest_rows import LargestRows
from penteract.ops.declarations.quantised.fp8 import ALIGNED
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket


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
        size = Counter(self.first.values())
        self.table = torch.zeros(len(size), ALIGNED, device=self.device)
        for number, b in enumerate(self.buckets):
            begin, spans = len(self.values), self._spans(b)
            for name in [name for name in spans if name not in self.values]:
                self.values[name] = self.table[len(self.values)][:1]
            # Weights that share a value may be in several buckets, if their moments have several dtypes.
            whole = all(len(parts) == size[name] for name, parts in spans.items())
            if spans and whole and not b.optimizer_kind.by_matrix:
                ends = [(parts[0][0], parts[-1][1]) for parts in spans.values()]
                if (rows := LargestRows.of(self.table[begin : len(self.values)], ends)) is not None:
                    self.rows[number] = rows

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
            self._find(q.name for q in self.buckets[bucket].params if q.name in self.first)

    def _find(self, names: Iterable[str]) -> None:
        for name in names:
            put_largest(self.weights[name], self.values[self.first[name]])

    def _spans(self, b: Bucket) -> dict[str, list[tuple[int, int]]]:
        """By value, first element and the one after the last of the weights in a bucket that share it."""
        spans = dict[str, list[tuple[int, int]]]()
        for q, begin in zip(b.params, b.offsets, strict=True):
            if q.name in self.first:
                spans.setdefault(self.first[q.name], []).append((begin, begin + self.weights[q.name].numel()))
        return spans
