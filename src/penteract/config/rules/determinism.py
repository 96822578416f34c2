"""What `kernels.determinism = "bitwise"` admits on a GPU: kernels that were seen to repeat a run to the bit, on such a
GPU. Those of attention and of experts say it themselves (`repeats`), and layouts with others are illegal. On a CPU all
repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import Fp8Scaling
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION, HOPPER
from penteract.config.run import RunSpec

SEEN_ON = "H200"


class NotSeen(NamedTuple):
    """A setting of a layout with which no run was seen to repeat on a GPU."""

    setting: str
    found: str
    allowed: tuple[str, ...]


# Scales of FP8 on one GPU.
ONE_RANK: tuple[Fp8Scaling, ...] = ("tensorwise", "rowwise")
# The run of two ranks, by its name in the record, whose steps were timed and take at most 1 % longer. Others repeat,
# too: ranks that share parameters reduce gradients beside attention's backward pass, which in order took 1.7 % of a
# step, not the 0.6 % that were planned; of the rest no step was timed.
TWO_RANKS = "tensor parallel, overlapped"


def was_repeated(run: RunSpec, gpu: str, host_ranks: int) -> bool:
    """Whether such runs were killed on such GPUs, resumed, and ended with the same bits (`same_bits_h200.json`), and
    only the setting makes them do so, in hardly more time. Others are legal; nobody gets them unasked. `host_ranks`:
    how many ranks are known to share a host and its NVLinks: others add by other calls of NCCL, and were not tried."""
    layout, policy = run.layout, run.precision.policy
    fused = ATTENTION.get(layout.attention)  # the plain kernel repeats without being asked
    if re.search(rf"\b{SEEN_ON}\b(?! NVL)", gpu) is None or fused is None or not fused.repeats:
        return False
    if layout.world == 1:
        return policy.fp8 is None or policy.fp8.kind in ONE_RANK
    plain = run.optimizer.kind == "adamw" and run.model.moe is None and policy == RECIPES["bf16"]
    split = layout.tp == layout.world == 2 and layout.collectives == "overlapped"
    return plain and split and layout.zero == 0 and host_ranks >= 2


def not_seen_to_repeat(model: ModelSpec, layout: Layout, capability: tuple[int, int]) -> Iterator[NotSeen]:
    """Why a bitwise layout cannot have GPUs of a compute capability."""
    if layout.determinism == "off":
        return
    if layout.elementwise != "triton":
        yield NotSeen("elementwise", layout.elementwise, ("triton",))
    if model.moe is not None and layout.experts in EXPERTS and not EXPERTS[layout.experts].repeats:
        able = (name for name, can in EXPERTS.items() if can.repeats)
        yield NotSeen("experts", layout.experts, ("reference", *able))
    if capability != HOPPER:
        here = "bitwise on compute capability {}.{}".format(*capability)
        yield NotSeen("determinism", here, ("off", "bitwise on {}.{}".format(*HOPPER)))
