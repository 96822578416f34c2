"""Declaration of cuDNN's attention. It is faster than the flash kernel, but takes only whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.ops.declarations.declaration import FLOAT, Attrs, Shape
from penteract.ops.declarations.fused_attention.fused import FusedAttention
from penteract.ops.spec import Widths

HEADER = 272  # bytes of seed, offset and what the library keeps of a call


class CudnnAttention(FusedAttention):
    """One call for all sequences."""

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        q, k, v = (prod(shape) for shape in ins[:3])
        rows = q // attrs["head_size"]
        o = rows * attrs["value_size"] * widths["compute"]
        call = HEADER + o + rows * FLOAT
        if phase != "forward":
            shared = 2 * o if k < q else 0  # gradients of keys and values by query head
            call = HEADER + (q + k + v) * widths["compute"] + (q + rows) * FLOAT + shared
        return self.restored(phase, ins, attrs, widths) + call
