"""Declaration of cuDNN's attention, the faster, which takes whole sequences alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.bodies.body import Attrs, Body, Shape
from penteract.ops.bodies.fused import FLOAT, RANDOM, Fused
from penteract.ops.spec import Widths


class CudnnAttention(Fused):
    """All sequences in one call."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        q, k, v = (prod(shape) for shape in ins[:3])
        rows = q // attrs["head_size"]
        call = RANDOM + rows * attrs["value_size"] * widths["compute"] + rows * FLOAT
        if phase != "forward":
            call = RANDOM + (q + k + v) * widths["compute"] + (q + rows) * FLOAT
        return self.restored(phase, ins, attrs, widths) + call


CUDNN: dict[str, Body] = {"attention": CudnnAttention()}
