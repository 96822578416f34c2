"""What each word's body declares, file by file as the bodies in engine/bodies. No torch."""

from __future__ import annotations

from penteract.ops.bodies.attention import ATTENTION
from penteract.ops.bodies.body import Body
from penteract.ops.bodies.dense import DENSE
from penteract.ops.bodies.experts import EXPERTS
from penteract.ops.bodies.fp8 import scaled_linear
from penteract.ops.bodies.fp8_experts import scaled_experts
from penteract.ops.bodies.kernels import fused
from penteract.ops.bodies.loss import LOSS
from penteract.ops.tape import Site
from penteract.spec.layout import Layout

BODIES: dict[str, Body] = DENSE | ATTENTION | LOSS | EXPERTS


def body_of(site: Site, layout: Layout) -> Body:
    """The body that computes a word where it is said, under a layout. All bodies of a word keep the same; they differ
    in what they allocate and how fast they are."""
    if (fp8 := site.attrs.get("fp8")) is not None:
        made = scaled_experts if site.word == "expert_linear" else scaled_linear
        return made(fp8, layout.elementwise)
    return fused(site.word, layout) or BODIES[site.word]


__all__ = ["BODIES", "Body", "body_of"]
