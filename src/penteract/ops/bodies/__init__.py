"""What each op and its implementations declare, file by file as in engine/bodies. No torch."""

from __future__ import annotations

from penteract.ops.bodies.body import Body
from penteract.ops.bodies.registry import OPS, Implementation, Op, body_of, implementation

__all__ = ["OPS", "Body", "Implementation", "Op", "body_of", "implementation"]
