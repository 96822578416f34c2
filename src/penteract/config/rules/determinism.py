"""What `kernels.determinism = "bitwise"` admits on a GPU: kernels that were seen to repeat a run to the bit, on such a
GPU. Those of attention and of experts say it themselves (`repeats`), and layouts with others are illegal. On a CPU all
repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION, HOPPER

SEEN_ON = "H200"


class NotSeen(NamedTuple):
    """A setting of a layout with which no run was seen to repeat on a GPU."""

    setting: str
    found: str
    allowed: tuple[str, ...]


def was_repeated(layout: Layout, policy: Policy, gpu: str) -> bool:
    """Whether such runs were killed on such a GPU, resumed, and ended with the same bits (`same_bits_h200.json`), and
    only the setting makes them do so. Others may repeat, too, and are legal; nobody gets them unasked."""
    one = layout.world == 1 and re.search(rf"\b{SEEN_ON}\b", gpu) is not None
    fused = ATTENTION.get(layout.attention)  # the plain kernel repeats without being asked
    return one and fused is not None and fused.repeats and (policy.fp8 is None or policy.fp8.kind == "rowwise")


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
