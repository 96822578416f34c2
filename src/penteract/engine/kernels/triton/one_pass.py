"""Ops that are one kernel, by name."""

from __future__ import annotations

from penteract.engine.kernels.triton.embedding import EMBEDDING
from penteract.engine.kernels.triton.loss import LOSS
from penteract.engine.kernels.triton.moe.token_blocks import BLOCKS
from penteract.engine.kernels.triton.moe.token_copies import EXPERTS
from penteract.engine.kernels.triton.norm import NORM
from penteract.engine.kernels.triton.rotary import ROPE
from penteract.engine.kernels.triton.swiglu import SWIGLU

ONE_PASS = {**NORM, **SWIGLU, **ROPE, **LOSS, **EMBEDDING, **EXPERTS, **BLOCKS}
