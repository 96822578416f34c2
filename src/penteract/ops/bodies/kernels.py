"""Which declarations a layout's kernels have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from penteract.ops.bodies import cudnn, flash
from penteract.ops.bodies.body import Body
from penteract.spec.layout import AttentionBody, Layout


def fused(word: str, layout: Layout) -> Body | None:
    """The declaration of a word that a layout's kernels compute; none where its body is plain torch."""
    if word != "attention" or layout.attention == "reference":
        return None
    return _fused(layout.attention, dealt=layout.cp > 1 and layout.context_method == "exchange").get(word)


@cache
def _fused(attention: AttentionBody, *, dealt: bool) -> Mapping[str, Body]:
    known = {"flash": (flash.FLASH, flash.FlashAttention), "cudnn": (cudnn.CUDNN, cudnn.CudnnAttention)}
    if attention not in known:
        return {}
    bodies, kind = known[attention]
    return {"attention": kind(dealt=True)} if dealt else bodies
