"""Where registers live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penteract.engine.state import COMPUTE, STAT
from penteract.ops.spec import Spec


class Memory(Protocol):
    device: torch.device

    def new(self, spec: Spec) -> torch.Tensor:
        """Storage for a register; its content is not defined."""
        ...


@dataclass(slots=True)
class Fresh:
    """Each register has a storage of its own from torch's allocator, given back with the register's last reference."""

    precision: str
    device: torch.device

    def new(self, spec: Spec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=dtype_of(spec, self.precision), device=self.device)  # type: ignore[arg-type]


def dtype_of(spec: Spec, precision: str) -> torch.dtype:
    """The torch dtype of a role under a precision."""
    return {"compute": COMPUTE[precision], "stat": STAT[precision], "index": torch.int64}[spec.role]
