"""Which kernels of experts' products a layout may have, by arithmetic.

Products by groups take all experts of a rank at once, and find on the device where the rows of each begin: a step does
not wait for the host to count them, but where an all-to-all sends them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from penteract.config.layout import ExpertKernel, ExpertRows, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy
from penteract.config.rules.kernel_limits import HOPPER, MULTIPLE, QUACK


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLimits:
    """What products by groups can do.

    computes   of which numbers, on a GPU
    device     the only type of device that has it; "": a CPU emulates it
    package    what it needs in addition to torch, and the version
    capability of the GPUs that its tiles have been chosen for; None: `least` or more
    repeats    whether it was seen to have the same bits whenever it is called
    """

    computes: tuple[str, ...]
    device: str = ""
    package: tuple[str, str] | None = None
    capability: tuple[int, int] | None = None
    least: tuple[int, int] = HOPPER
    repeats: bool = False


# Fastest first.
EXPERTS: Mapping[ExpertKernel, ExpertLimits] = {
    "quack": ExpertLimits(computes=("bf16", "fp16"), device="cuda", package=QUACK, capability=HOPPER, repeats=True),
    "grouped": ExpertLimits(computes=("bf16",)),
}


def expert_breaches(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong), as in `rules`."""
    if model.moe is not None and layout.expert_rows == "padded" and layout.experts == "reference":
        yield "expert_rows", "rows are padded for products by groups: the kernel 'reference' makes one for each expert"
    if layout.experts not in EXPERTS or model.moe is None:
        return
    if layout.determinism == "bitwise" and not EXPERTS[layout.experts].repeats:
        yield "experts", f"the kernel '{layout.experts}' was not seen to repeat, and determinism is bitwise"
    own = model.moe.ffn_size // layout.expert_tp
    for name, size in (("hidden_size", model.hidden_size), ("an expert's ffn_size on a rank", own)):
        if size % MULTIPLE:
            yield (
                "experts",
                f"the kernel '{layout.experts}' takes rows of a multiple of {MULTIPLE}, and {name} is {size}",
            )


def fastest_experts(
    model: ModelSpec, layout: Layout, p: Policy, packages: Collection[str] = (), *, capability: tuple[int, int] = HOPPER
) -> ExpertKernel:
    """The fastest that a layout may have on a GPU of a compute capability, with torch and `packages`."""
    if model.moe is None:
        return "reference"
    for kernel, can in EXPERTS.items():
        fits = capability == can.capability if can.capability else capability >= can.least
        if not fits or p.compute not in can.computes or (can.package and can.package[0] not in packages):
            continue
        if layout.determinism == "bitwise" and not can.repeats:
            continue
        sizes = (model.hidden_size, model.moe.ffn_size // layout.expert_tp)
        if not any(size % MULTIPLE for size in sizes):
            return kernel
    return "reference"


def fastest_rows(model: ModelSpec, layout: Layout, p: Policy) -> ExpertRows:
    """Of GPUs, by the layout's own kernel of experts: padded where it may have them, as the host waits for no count."""
    fp8 = p.fp8 is not None and p.fp8.experts
    able = model.moe is not None and layout.gathers_tokens and layout.experts != "reference" and not fp8
    return "padded" if able else "exact"
