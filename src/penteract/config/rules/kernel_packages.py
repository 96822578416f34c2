"""Packages of kernels, which `pip install 'penteract[gpu]'` adds to torch."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION, FA4, QUACK, has_glu, installed_packages
from penteract.errors import BadInput

KERNELS = (FA4, QUACK)  # the name of each, and the version that is called
PACKAGES = frozenset(name for name, _ in KERNELS)


def packages_needed(model: ModelSpec, layout: Layout) -> frozenset[str]:
    """Those that the kernels of a layout call."""
    limits = [ATTENTION.get(layout.attention), EXPERTS.get(layout.experts) if model.moe else None]
    found = {can.package[0] for can in limits if can is not None and can.package}
    glu = "glu" in layout.fuse and layout.elementwise == "triton" and has_glu(model)
    return frozenset(found | ({QUACK[0]} if glu else set()))


def needs_packages(names: Collection[str]) -> tuple[str, ...]:
    """That these are needed in addition to torch: a line, or none."""
    text = " and ".join(sorted(names))
    return (f"Needs {text} on the GPUs' hosts: pip install 'penteract[gpu]'",) if names else ()


def packages_for(capability: tuple[int, int] | None) -> frozenset[str]:
    """Those that have kernels for GPUs of a compute capability."""
    limits = (*ATTENTION.values(), *EXPERTS.values())
    return frozenset(can.package[0] for can in limits if can.package and can.capability == capability)


def packages_here() -> frozenset[str]:
    """Those that are installed on this machine in the version that is called."""
    return installed_packages(*KERNELS)


def read_packages(words: str | Collection[str]) -> frozenset[str]:
    """Names with commas between them, or `none`. Raises BadInput for others."""
    given = words.split(",") if isinstance(words, str) else words
    names = [name.strip().lower().replace("_", "-") for name in given]
    if names == ["none"]:
        return frozenset()
    for name in names:
        if name not in PACKAGES:
            near = get_close_matches(name, PACKAGES, 1) or ["none"]
            raise BadInput("VALUE", "no package of kernels", where="--packages", found=name or "nothing",
                           allowed=", ".join(("none", *sorted(PACKAGES))), fix=f"--packages {near[0]}")  # fmt: skip
    return frozenset(names)
