"""What each op and its implementations declare, in files named as those of engine/kernels. No torch."""

from __future__ import annotations

from penteract.ops.declarations.declaration import OpDeclaration
from penteract.ops.declarations.registry import OPS, WITH_ROOM, Implementation, Op, declaration_of, implementation

__all__ = ["OPS", "WITH_ROOM", "Implementation", "Op", "OpDeclaration", "declaration_of", "implementation"]
