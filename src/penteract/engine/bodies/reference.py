"""What plain torch computes, on any device: each op by its reference implementation. FP8 is emulated."""

from __future__ import annotations

import torch

from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.registry import bodies_by_call
from penteract.spec.layout import Layout

REFERENCE: dict[str, TorchBody] = bodies_by_call(Layout(), torch.device("cpu"))
