"""What a value is before it has bytes: a shape and a role. Sizes that only routing knows stay names."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from penteract.config.precision.policy import Role, Widths


class Received(NamedTuple):
    """A dim whose size is data: the token copies that this rank's experts of `layer` receive."""

    layer: int


Dim = int | Received


class Spec(NamedTuple):
    """Shape and role of a value. `[R, D]` with R = Received(3) is known once a load is given.

    `pinned`: in the host's memory, page-locked, and so without bytes on the device.
    """

    shape: tuple[Dim, ...]
    role: Role = "compute"
    pinned: bool = False

    def numel(self, received: Callable[[int], int] | None = None) -> int:
        """Elements; `received(layer)` gives the sizes that routing decides."""
        return prod(size(d, received) for d in self.shape)


def size(dim: Dim, received: Callable[[int], int] | None = None) -> int:
    """A dim as a number."""
    if isinstance(dim, int):
        return dim
    if received is None:
        raise ValueError(f"the tokens received at layer {dim.layer} are data: pass a load")
    return received(dim.layer)


__all__ = ["Dim", "Received", "Role", "Spec", "Widths", "size"]
