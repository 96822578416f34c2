"""Where registers live: an allocator gives each its storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.dtypes import dtype_of
from penteract.ops.spec import Spec
from penteract.step.arena import ArenaPlan


class Allocator(Protocol):
    """Where the registers of a step come from."""

    device: torch.device

    def begin(self) -> None:
        """A step begins: nothing lives."""
        ...

    def new(self, spec: Spec) -> torch.Tensor:
        """Storage for a register; its content is not defined."""
        ...

    def resident(self) -> list[torch.Tensor]:
        """What stays between steps."""
        ...


@dataclass(slots=True)
class Fresh:
    """Each register has a storage of its own from torch's allocator, given back with the register's last reference."""

    precision: str | Policy
    device: torch.device

    def begin(self) -> None: ...

    def resident(self) -> list[torch.Tensor]:
        return []

    def new(self, spec: Spec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=dtype_of(spec.role, self.precision), device=self.device)  # type: ignore[arg-type]


@dataclass(slots=True)
class Arena:
    """One block, every register at the place that was planned for it; routed sizes alone come from the allocator."""

    plan: ArenaPlan
    precision: str | Policy
    device: torch.device
    shared: torch.Tensor | None = None  # the block of another arena, idle while this one is in use
    pinned: bool = False  # page-locked, for copies beside compute
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
        self.next += 1
        if at is None:
            return torch.empty(spec.shape, dtype=dtype, device=self.device)  # type: ignore[arg-type]
        n = spec.numel() * dtype.itemsize
        return self.block[at : at + n].view(dtype).view(spec.shape)  # type: ignore[arg-type]
