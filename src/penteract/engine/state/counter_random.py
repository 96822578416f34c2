"""Random numbers by counters: an element's depends on the seed, the purpose, its parameter's name and its index in the
global tensor, and on nothing else. So every layout, device and order of drawing has the same numbers.

SplitMix64 (Steele 2014): each counter is STRIDE further than the one before, and MIXES make 64 random bits of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from penteract.config.mesh import Mesh
from penteract.ops.params import Param

# As signed numbers: products wrap.
STRIDE = 0x9E3779B97F4A7C15 - 2**64
MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))

Purpose = Literal["initial", "rounding"]


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A part of a parameter in a shard: elements [at, at + count) of the shard are those from `begin` on of the
    parameter's local rectangle, in row-major order."""

    name: str
    local: tuple[int, ...]
    strides: tuple[int, ...]  # of the global tensor, in elements
    origin: int  # index of the rectangle's first element in the global tensor
    at: int
    begin: int
    count: int

    @staticmethod
    def of(q: Param, mesh: Mesh, rank: int, *, at: int, begin: int, count: int) -> ParameterSlice:
        """The slice of `count` elements from `begin` on of q's local rectangle on `rank`, at `at` in the shard."""
        strides = tuple(prod(q.shape[i + 1 :]) for i in range(len(q.shape)))
        origin = sum(o * s for o, s in zip(q.offset(mesh, rank), strides, strict=True))
        return ParameterSlice(q.name, q.local_shape(mesh), strides, origin, at, begin, count)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(elements of a local row, elements of the global row that are not local) of each dim that is sharded. Each
        complete row before an element adds the second number to its global index."""
        gaps = ((prod(self.local[i + 1 :]), self.strides[i] - self.local[i + 1] * self.strides[i + 1])
                for i in range(len(self.local) - 1))  # fmt: skip
        return tuple((row, gap) for row, gap in gaps if gap)

    def start(self, seed: int, purpose: Purpose) -> int:
        """The start of the parameter's random sequence: 64 bits, signed."""
        whole = hashlib.sha256(f"{seed}/{self.name}/{purpose}".encode()).digest()
        return int.from_bytes(whole[:8], "little", signed=True)

    def put_global_indices(self, out: torch.Tensor, first: int) -> None:
        """Write the global indices of n elements of this slice, from `first` of the shard on, into out: int64 [n]."""
        span = (self.begin + first - self.at, self.begin + first - self.at + len(out))
        torch.arange(span[0] + self.origin, span[1] + self.origin, out=out)
        for row, gap in self.gaps:
            rows = torch.arange(*span, device=out.device)
            out.add_(rows.div_(row, rounding_mode="floor"), alpha=gap)
            del rows


def mix(z: torch.Tensor) -> torch.Tensor:
    """Turn counters into random bits, in place: int64 of any shape. One temporary of its size."""
    for shift, factor in MIXES:
        above = z >> shift
        above.bitwise_and_(2 ** (64 - shift) - 1)
        z.bitwise_xor_(above)
        del above
        if factor != 1:
            z.mul_(factor)
    return z
