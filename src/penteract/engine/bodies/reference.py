"""All reference bodies by word. FP8 is emulated."""

from __future__ import annotations

from penteract.engine.bodies.attention import ATTENTION
from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.dense import DENSE
from penteract.engine.bodies.experts import EXPERTS
from penteract.engine.bodies.fp8 import by_recipe, emulated, scaled
from penteract.engine.bodies.loss import LOSS

REFERENCE: dict[str, TorchBody] = DENSE | ATTENTION | LOSS | EXPERTS
REFERENCE["linear"] = by_recipe(DENSE["linear"], scaled(emulated))
