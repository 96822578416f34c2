"""Which GPUs the kernels of a layout are for, as their limits declare it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penteract.config.catalog.hardware import tables
from penteract.config.device_words import CPU
from penteract.config.hardware import Gpu
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.determinism import not_seen_to_repeat
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION, HOPPER, has_glu
from penteract.errors import BadInput

Capability = tuple[int, int]


class OtherGpus(NamedTuple):
    """A kernel of a layout that a GPU cannot run. `allowed`: the GPUs that it is for."""

    setting: str
    what: str
    allowed: str


def for_other_gpus(model: ModelSpec, layout: Layout, capability: Capability) -> Iterator[OtherGpus]:
    """The kernels of a layout that GPUs of a compute capability cannot run."""
    attention, experts = ATTENTION.get(layout.attention), EXPERTS.get(layout.experts)
    if attention is not None and attention.capability not in (None, capability):
        yield _other("attention", f"the attention kernel '{layout.attention}'", attention.capability)
    if experts is not None and model.moe is not None:
        what = f"the experts' kernel '{layout.experts}'"
        if experts.capability is not None and experts.capability != capability:
            yield _other("experts", what, experts.capability)
        elif experts.capability is None and capability < experts.least:
            yield _other("experts", what, experts.least, or_more=True)
    if "glu" in layout.fuse and layout.elementwise != "reference" and has_glu(model) and capability != HOPPER:
        yield _other("fuse", "the fusion 'glu'", HOPPER)


def for_gpus_alone(layout: Layout) -> Iterator[str]:
    """The settings of a layout whose kernels no CPU runs."""
    attention, experts = ATTENTION.get(layout.attention), EXPERTS.get(layout.experts)
    yield from ["attention"] * (attention is not None and attention.device == "cuda")
    yield from ["experts"] * (experts is not None and experts.device == "cuda")
    yield from ["elementwise"] * (layout.elementwise != "reference")


def check_kernels_for(
    model: ModelSpec, layout: Layout, gpu: Gpu, where: Callable[[str], str], fix: Callable[[str], str]
) -> None:
    """Refuse a layout whose kernels a GPU cannot run: they would be priced as if they did. `where`, `fix`: of a
    setting. Raises BadInput."""
    for setting in for_gpus_alone(layout) if gpu.name == CPU else ():
        raise BadInput("KERNEL", "a kernel for GPUs, and this hardware file is of a CPU", where=where(setting),
                       found=getattr(layout, setting), allowed="reference", fix=fix(setting))  # fmt: skip
    for setting, what, allowed in for_other_gpus(model, layout, gpu.capability):
        own = _text(gpu.capability) if any(gpu.capability) else "of none"
        raise BadInput("KERNEL", f"{what} is for other GPUs", where=where(setting),
                       found=f"{gpu.name}, compute capability {own}", allowed=allowed, fix=fix(setting))  # fmt: skip
    for setting, found, allowed in not_seen_to_repeat(model, layout, gpu.capability) if gpu.name != CPU else ():
        raise BadInput("KERNEL", "not seen to repeat to the bit", where=where(setting), found=found,
                       allowed=", ".join(allowed), fix=fix(setting))  # fmt: skip


def _other(setting: str, what: str, wanted: Capability | None, *, or_more: bool = False) -> OtherGpus:
    assert wanted is not None
    rows = ((name, tuple(row.get("capability", (0, 0)))) for name, row in tables("gpus").items())
    able = [name for name, its in rows if its == wanted or (or_more and its >= wanted)]
    return OtherGpus(setting, what, f"{_text(wanted)}{' or more' * or_more} ({', '.join(able)})")


def _text(capability: Capability) -> str:
    return "{}.{}".format(*capability)
