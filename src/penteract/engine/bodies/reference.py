"""All reference bodies by word. FP8 is emulated."""

from __future__ import annotations

from penteract.engine.bodies.attention import ATTENTION
from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.dense import DENSE
from penteract.engine.bodies.experts import EXPERTS
from penteract.engine.bodies.fp8 import by_recipe, emulated, scaled
from penteract.engine.bodies.fp8_experts import scaled_experts
from penteract.engine.bodies.loss import LOSS

PLAIN: dict[str, TorchBody] = DENSE | ATTENTION | LOSS | EXPERTS
REFERENCE: dict[str, TorchBody] = PLAIN | {
    "linear": by_recipe(PLAIN["linear"], scaled(emulated)),
    "expert_linear": by_recipe(PLAIN["expert_linear"], scaled_experts(emulated)),
}
