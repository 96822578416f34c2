"""Which layouts may have gate and up projections whose product applies SwiGLU: the fusion "glu"."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penteract.config.expert_kernels import MULTIPLE, QUACK
from penteract.config.kernel_limits import HOPPER
from penteract.config.layout import EVERY_FUSION, FUSIONS, Fusion, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy

COMPUTES = ("bf16", "fp16")


def glu_breaches(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """(axis, what is wrong), as in `rules`."""
    if "glu" not in layout.fuse or layout.elementwise == "reference":
        return
    for name, size in _sizes(model, layout):
        if size % MULTIPLE:
            yield "fuse", f"the fusion 'glu' takes rows of a multiple of {MULTIPLE}, and {name} is {size}"


def fastest_fusions(
    model: ModelSpec, layout: Layout, p: Policy, packages: Collection[str] = (), *, capability: tuple[int, int] = HOPPER
) -> tuple[Fusion, ...]:
    """The fusions that a layout may have on a GPU of a compute capability, with torch, Triton and `packages`."""
    plain = p.fp8 is None and p.compute in COMPUTES and not any(size % MULTIPLE for _, size in _sizes(model, layout))
    return EVERY_FUSION if plain and QUACK[0] in packages and capability == HOPPER else FUSIONS


def _sizes(model: ModelSpec, layout: Layout) -> tuple[tuple[str, int], ...]:
    return ("hidden_size", model.hidden_size), ("the ffn_size on a rank", model.ffn_size // layout.tp)
