"""Which declarations a layout's kernels have."""

from __future__ import annotations

from penteract.ops.bodies import cudnn, flash
from penteract.ops.bodies.body import Body
from penteract.spec.layout import Layout


def fused(layout: Layout) -> dict[str, Body]:
    """Declarations of the words that a layout's kernels compute; none where its bodies are plain torch."""
    known = {"flash": (flash.FLASH, flash.FlashAttention), "cudnn": (cudnn.CUDNN, cudnn.CudnnAttention)}
    if layout.attention not in known:
        return {}
    bodies, kind = known[layout.attention]
    dealt = layout.cp > 1 and layout.context_method == "exchange"
    return {"attention": kind(dealt=True)} if dealt else bodies
