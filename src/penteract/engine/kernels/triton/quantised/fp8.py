"""FP8 linear layers whose operands are quantised by Triton kernels."""

from __future__ import annotations

from penteract.engine.kernels.quantised.fp8 import real, scaled
from penteract.engine.kernels.quantised.fp8_experts import FOUR, in_fours, scaled_experts
from penteract.engine.kernels.triton.quantised.quantise import TRITON

FP8 = {
    "linear": scaled(real, TRITON),
    "expert_linear": scaled_experts(in_fours(real), TRITON, multiple=FOUR),
}
