"""What a value is before it has bytes: a shape and a role. Sizes that only routing knows stay names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

# compute: activations; stat: statistics kept beside them (1/rms, log-sum-exp); index: token and expert numbers;
# host: a value that lives in host memory as plain Python (split sizes), without bytes on the device.
Role = Literal["compute", "stat", "index", "host"]


@dataclass(frozen=True, slots=True)
class Received:
    """A dim whose size is data: the token copies that this rank's experts of `layer` receive."""

    layer: int


Dim = int | Received


@dataclass(frozen=True, slots=True)
class Spec:
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


Widths = Mapping[Role, int]  # bytes of one element of each role

WIDTHS: dict[str, Widths] = {
    "fp64": {"compute": 8, "stat": 8, "index": 8, "host": 0},
    "fp32": {"compute": 4, "stat": 4, "index": 8, "host": 0},
    "bf16": {"compute": 2, "stat": 4, "index": 8, "host": 0},
}
