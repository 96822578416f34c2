"""What each word's body declares, file by file as the bodies in engine/bodies. No torch."""

from __future__ import annotations

from penteract.ops.bodies.attention import ATTENTION
from penteract.ops.bodies.body import Body
from penteract.ops.bodies.dense import DENSE
from penteract.ops.bodies.experts import EXPERTS
from penteract.ops.bodies.loss import LOSS

BODIES: dict[str, Body] = DENSE | ATTENTION | LOSS | EXPERTS

__all__ = ["BODIES", "Body"]
