"""Allocators: storage for the registers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.dtypes import dtype_of
from penteract.ops.spec import Spec
from penteract.step.arena import ArenaPlan


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
class Arena:
    """One block with each register at its planned offset. Registers of routed size come from torch's allocator."""

    plan: ArenaPlan
    precision: str | Policy
    device: torch.device
    shared: torch.Tensor | None = None  # a block that others use too: another arena at other times, or other ranks
    pinned: bool = False  # page-locked, for copies that overlap compute
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
        return torch.empty(spec.shape, dtype=dtype_of(spec.role, self.precision), device=self.device)  # type: ignore[arg-type]
