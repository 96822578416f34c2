"""Where an update puts the largest absolute values of the weights that it makes, for their casts to FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch

from penteract.parallel.known_weights import TILE


class LargestRows(NamedTuple):
    """Of a shard, or a part of it that begins at tile `first` of its bucket.

    rows  [n, 4], fp32, in the order of the weights: the value; as int32, the first tile and the one after the last
    """

    rows: torch.Tensor
    first: int = 0

    @staticmethod
    def of(rows: torch.Tensor, spans: list[tuple[int, int]]) -> LargestRows:
        """Rows for weights by their elements in a bucket, in order; each begins and ends with a tile."""
        rows.view(torch.int32)[:, 1:3].copy_(torch.tensor(spans) // TILE)
        return LargestRows(rows)

    def part(self, begin: int) -> LargestRows:
        """The same for the elements from `begin` on, a multiple of a tile."""
        return self._replace(first=self.first + begin // TILE)
