"""The spec of a value: its shape and its role. Sizes that depend on routing are symbolic."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from penteract.config.precision.policy import Role, Widths


class Received(NamedTuple):
    """A data-dependent dim: the token copies that this rank's experts of `layer` receive. `at_most`: of a register with
    room for so many, which is all that the host knows of them; 0: the host reads how many there are."""

    layer: int
    at_most: int = 0


Dim = int | Received


class Spec(NamedTuple):
    """Shape and role of a value. `[R, D]` with R = Received(3) has a number only for a given expert load.

    `pinned`: in pinned host memory, so it takes no bytes on the device.
    """

    shape: tuple[Dim, ...]
    role: Role = "compute"
    pinned: bool = False

    def numel(self, received: Callable[[int], int] | None = None) -> int:
        """Elements; `received(layer)` gives the sizes that depend on routing."""
        return prod(size(d, received) for d in self.shape)


def size(dim: Dim, received: Callable[[int], int] | None = None) -> int:
    """A dim as a number."""
    if isinstance(dim, int):
        return dim
    if received is None:
        raise ValueError(f"the tokens received at layer {dim.layer} are data: pass a load")
    return received(dim.layer)


def room(dim: Dim, received: Callable[[int], int] | None = None) -> int:
    """A dim of the register that holds it: a size, or the most that it may be."""
    return dim.at_most if isinstance(dim, Received) and dim.at_most else size(dim, received)


__all__ = ["Dim", "Received", "Role", "Spec", "Widths", "room", "size"]
