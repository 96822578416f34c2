"""Without a GPU, kernels run in Triton's interpreter. It must know before anything of Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
