"""Rounding up or down by chance: a function of the seed, the step, and an element's place in its global tensor.

A parameter without a master keeps 8 bits; an update below half of the last one would be lost each time. Rounded up with
the probability of what is cut off, it is right on average (Gupta 2015, 1502.02551). As nothing else decides, every
layout rounds alike, and replicas stay equal.
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
EPOCH = 2**40  # from a step's numbers to those of the next
LOW = 16  # bits that bfloat16 does not have of float32


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Where a part of a parameter lies: elements [at, at + count) of a shard are those from `begin` on of its local
    rectangle, read row by row."""

    name: str
    local: tuple[int, ...]
    strides: tuple[int, ...]  # of the global tensor, in elements
    origin: int  # of the rectangle's first element
    at: int
    begin: int
    count: int

    @staticmethod
    def of(q: Param, mesh: Mesh, rank: int, *, at: int, begin: int, count: int) -> ParameterSlice:
        """Of `count` elements of q's local rectangle on `rank`, from `begin` on; they lie at `at` in the shard."""
        strides = tuple(prod(q.shape[i + 1 :]) for i in range(len(q.shape)))
        origin = sum(o * s for o, s in zip(q.offset(mesh, rank), strides, strict=True))
        return ParameterSlice(q.name, q.local_shape(mesh), strides, origin, at, begin, count)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where a dim is cut: the elements of a row here, and those between what is here and what is whole, which each
        row before adds."""
        gaps = ((prod(self.local[i + 1 :]), self.strides[i] - self.local[i + 1] * self.strides[i + 1])
                for i in range(len(self.local) - 1))  # fmt: skip
        return tuple((row, gap) for row, gap in gaps if gap)

    def digest(self, seed: int) -> int:
        """Where its numbers begin: 64 bits, signed."""
        whole = hashlib.sha256(f"{seed}/{self.name}/rounding".encode()).digest()
        return int.from_bytes(whole[:8], "little", signed=True)

    def put_global(self, out: torch.Tensor, first: int) -> None:
        """Where elements from `first` of the shard on, all of this part, are in the global one, into out: int64 [n]."""
        span = (self.begin + first - self.at, self.begin + first - self.at + len(out))
        torch.arange(*span, out=out)
        for row, gap in self.gaps:
            rows = torch.arange(*span, device=out.device)
            out.add_(rows.div_(row, rounding_mode="floor"), alpha=gap)
            del rows
        out.add_(self.origin)


def round_into(narrow: torch.Tensor, wide: torch.Tensor, bits: torch.Tensor) -> None:
    """bfloat16 from float32, whose content is lost: `bits`, below 2^16, are added below the last bit that stays."""
    pattern = wide.view(torch.int32)
    pattern.add_(bits).bitwise_and_(-(2**LOW))
    narrow.copy_(wide)


def chances(places: Iterable[ParameterSlice], part: slice, seed: int, step: torch.Tensor) -> torch.Tensor:
    """Random numbers below 2^16 for a shard's elements `part`, int64 [n]. step: [], on the device."""
    z = torch.zeros(part.stop - part.start, dtype=torch.int64, device=step.device)
    now = step.to(torch.int64)
    for place in places:
        first, last = max(part.start, place.at), min(part.stop, place.at + place.count)
        if first < last:
            own = z[first - part.start : last - part.start]
            place.put_global(own, first)
            own.add_(now, alpha=EPOCH).mul_(STRIDE).add_(place.digest(seed))
    for shift, factor in MIXES:
        above = z >> shift
        above.bitwise_and_(2 ** (64 - shift) - 1)
        z.bitwise_xor_(above).mul_(factor)
        del above
    return z.bitwise_and_(2**LOW - 1)
