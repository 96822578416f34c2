"""Stochastic rounding. The random bits depend on the seed, the step, and an element's index in its global tensor.

A bf16 parameter without master weights has 8 significant bits; an update below half of the last bit would be lost in
every step. Rounding up with the probability of the cut-off fraction is right on average (Gupta 2015, 1502.02551). The
random bits depend on nothing else, so every layout rounds alike, and replicas stay equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from penteract.config.mesh import Mesh
from penteract.ops.params import Param

# SplitMix64 (Steele 2014), as signed numbers: products wrap.
STRIDE = 0x9E3779B97F4A7C15 - 2**64
MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
EPOCH = 2**40  # distance from a step's counters to the next step's; more than elements of a tensor
LOW = 16  # bits of float32 that bfloat16 lacks


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

    def digest(self, seed: int) -> int:
        """The start of the parameter's random sequence: 64 bits, signed."""
        whole = hashlib.sha256(f"{seed}/{self.name}/rounding".encode()).digest()
        return int.from_bytes(whole[:8], "little", signed=True)

    def put_global_indices(self, out: torch.Tensor, first: int) -> None:
        """Write the global indices of n elements of this slice, from `first` of the shard on, into out: int64 [n]."""
        span = (self.begin + first - self.at, self.begin + first - self.at + len(out))
        torch.arange(*span, out=out)
        for row, gap in self.gaps:
            rows = torch.arange(*span, device=out.device)
            out.add_(rows.div_(row, rounding_mode="floor"), alpha=gap)
            del rows
        out.add_(self.origin)


def round_into(narrow: torch.Tensor, wide: torch.Tensor, bits: torch.Tensor) -> None:
    """Round float32 to bfloat16: `bits`, below 2^16, are added to the bits that are cut off. `wide` is lost."""
    pattern = wide.view(torch.int32)
    pattern.add_(bits).bitwise_and_(-(2**LOW))
    narrow.copy_(wide)


def random_bits(slices: Iterable[ParameterSlice], part: slice, seed: int, step: torch.Tensor) -> torch.Tensor:
    """Random numbers below 2^16 for a shard's elements `part`, int64 [n]. step: [], on the device."""
    z = torch.zeros(part.stop - part.start, dtype=torch.int64, device=step.device)
    now = step.to(torch.int64)
    for s in slices:
        first, last = max(part.start, s.at), min(part.stop, s.at + s.count)
        if first < last:
            own = z[first - part.start : last - part.start]
            s.put_global_indices(own, first)
            own.add_(now, alpha=EPOCH).mul_(STRIDE).add_(s.digest(seed))
    for shift, factor in MIXES:
        above = z >> shift
        above.bitwise_and_(2 ** (64 - shift) - 1)
        z.bitwise_xor_(above).mul_(factor)
        del above
    return z.bitwise_and_(2**LOW - 1)
