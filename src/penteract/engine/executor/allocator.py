"""Allocators: storage for the registers of a step."""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.dtypes import dtype_of
from penteract.ops.spec import Spec
from penteract.step.arena import ArenaPlan
from penteract.step.offsets import ALIGNMENT
from penteract.units import Bytes


class Allocator(Protocol):
    """Allocates the registers of a step."""

    device: torch.device

    def begin(self) -> None:
        """A step begins: no register is alive."""
        ...

    def new(self, spec: Spec) -> torch.Tensor:
        """Storage for a register; its content is not defined."""
        ...

    def routed(self, spec: Spec) -> torch.Tensor:
        """The same for a register whose size routing decided: it comes from torch's allocator."""
        ...

    def resident(self) -> list[torch.Tensor]:
        """Storage that is kept between steps."""
        ...


@dataclass(slots=True)
class Fresh:
    """Each register has its own storage from torch's allocator; the last reference to the register frees it."""

    precision: str | Policy
    device: torch.device

    def begin(self) -> None: ...

    def resident(self) -> list[torch.Tensor]:
        return []

    def new(self, spec: Spec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=dtype_of(spec.role, self.precision), device=self.device)  # type: ignore[arg-type]

    def routed(self, spec: Spec) -> torch.Tensor:
        return self.new(spec)


@dataclass(slots=True)
class Spare:
    """What a block has beyond an arena that lies in it: registers of routed size take the first place that is large
    enough, until nobody holds them any more.

    free  places [begin, end) in bytes, in order
    """

    block: torch.Tensor
    free: list[tuple[int, int]]

    @staticmethod
    def of(block: torch.Tensor, begin: Bytes) -> Spare:
        """All that a block [bytes] has from there on."""
        begin = _aligned(begin)
        return Spare(block, [(begin, block.numel())] if begin < block.numel() else [])

    def take(self, size: Bytes) -> tuple[torch.Tensor, Callable[[], None]] | None:
        """Bytes of the block, and what gives them back; None where there is no such place."""
        size = _aligned(size)
        for i, (begin, end) in enumerate(self.free):
            if end - begin >= size:
                self.free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return self.block[begin : begin + size], partial(self._give, begin, begin + size)
        return None

    def _give(self, begin: Bytes, end: Bytes) -> None:
        at = bisect(self.free, (begin, end))
        if at < len(self.free) and self.free[at][0] == end:
            end = self.free.pop(at)[1]
        if at and self.free[at - 1][1] == begin:
            at -= 1
            begin = self.free.pop(at)[0]
        self.free.insert(at, (begin, end))


def _aligned(size: Bytes) -> Bytes:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Arena:
    """One block with each register at its planned offset. Registers of routed size come from torch's allocator, or
    first from `spare`."""

    plan: ArenaPlan
    precision: str | Policy
    device: torch.device
    shared: torch.Tensor | None = None  # a block that others use too: another arena at other times, or other ranks
    pinned: bool = False  # page-locked, for copies that overlap compute
    spare: Spare | None = None
    block: torch.Tensor = field(init=False)
    next: int = 0

    def __post_init__(self) -> None:
        if self.shared is not None and self.shared.numel() >= self.plan.size:
            self.block = self.shared
        else:
            self.block = torch.empty(self.plan.size, dtype=torch.uint8, device=self.device, pin_memory=self.pinned)

    def begin(self) -> None:
        self.next = 0

    def resident(self) -> list[torch.Tensor]:
        return [self.block]

    def new(self, spec: Spec) -> torch.Tensor:
        at, dtype = self.plan.offsets[self.next], dtype_of(spec.role, self.precision)
        assert at is not None, "a register of routed size has no place in the arena"
        self.next += 1
        n = spec.numel() * dtype.itemsize
        return self.block[at : at + n].view(dtype).view(spec.shape)  # type: ignore[arg-type]

    def routed(self, spec: Spec) -> torch.Tensor:
        self.next += 1
        dtype = dtype_of(spec.role, self.precision)
        size = spec.numel() * dtype.itemsize
        if self.spare is None or not size or (found := self.spare.take(size)) is None:
            return torch.empty(spec.shape, dtype=dtype, device=self.device)  # type: ignore[arg-type]
        room, give = found
        made = room[:size].view(dtype).view(spec.shape)  # type: ignore[arg-type]
        weakref.finalize(made, give).atexit = False
        return made
