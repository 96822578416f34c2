"""A small question of `penteract plan`, and the few layouts that answer it soonest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tell = Callable[..., Any]
TINY_STEP = ["tiny", "--gpus", "4xH200", "--seq", "256", "--batch", "16seqs"]
FEW = ["--fix", "cp=1,pp=1/2,recompute=none"]
