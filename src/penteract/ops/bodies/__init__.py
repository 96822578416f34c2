"""What each word's body declares, file by file as the bodies in engine/bodies. No torch."""

from __future__ import annotations

from penteract.ops.bodies.attention import ATTENTION
from penteract.ops.bodies.body import Body
from penteract.ops.bodies.dense import DENSE
from penteract.ops.bodies.experts import EXPERTS
from penteract.ops.bodies.kernels import fused
from penteract.ops.bodies.loss import LOSS
from penteract.spec.layout import Layout

BODIES: dict[str, Body] = DENSE | ATTENTION | LOSS | EXPERTS


def body_of(word: str, layout: Layout) -> Body:
    """The body that computes `word` under a layout. All bodies of a word keep the same; they differ in what they
    allocate and how fast they are."""
    return fused(layout).get(word) or BODIES[word]


__all__ = ["BODIES", "Body", "body_of"]
