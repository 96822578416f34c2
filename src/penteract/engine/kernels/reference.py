"""The reference implementation of each op, in plain torch on any device. FP8 is emulated."""

from __future__ import annotations

import torch

from penteract.config.layout import Layout
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.registry import kernels_by_call

REFERENCE: dict[str, TorchKernel] = kernels_by_call(Layout(), torch.device("cpu"))
