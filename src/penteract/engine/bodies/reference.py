"""What plain torch computes, on any device: each op by its reference implementation. FP8 is emulated."""

from __future__ import annotations

import torch

from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.registry import bodies
from penteract.spec.layout import Layout

REFERENCE: dict[str, TorchBody] = bodies(Layout(), torch.device("cpu"))
