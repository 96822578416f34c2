"""Packages of kernels, which `pip install 'penteract[gpu]'` adds to torch."""

from __future__ import annotations

from collections.abc import Collection

from penteract.config.hardware import Gpu
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION, FA4, HOPPER, QUACK, installed_packages
from penteract.errors import BadInput

PACKAGES = frozenset(name for name, _ in (FA4, QUACK))


def packages_of(model: ModelSpec, layout: Layout) -> frozenset[str]:
    """Those that the kernels of a layout need."""
    limits = [ATTENTION.get(layout.attention), EXPERTS.get(layout.experts) if model.moe else None]
    found = {can.package[0] for can in limits if can is not None and can.package}
    return frozenset(found | ({QUACK[0]} if "glu" in layout.fuse and layout.elementwise == "triton" else set()))


def packages_for(gpu: Gpu | None) -> frozenset[str]:
    """Those that have kernels for a GPU."""
    return PACKAGES if gpu is not None and gpu.capability == HOPPER else frozenset()


def packages_here() -> frozenset[str]:
    """Those that are installed on this machine in the version that is called."""
    return installed_packages(FA4, QUACK)


def read_packages(words: str | Collection[str]) -> frozenset[str]:
    """Names with commas between them, or `none`. Raises BadInput for others."""
    names = [name.strip() for name in words.split(",")] if isinstance(words, str) else list(words)
    if names == ["none"]:
        return frozenset()
    if unknown := [name for name in names if name not in PACKAGES]:
        raise BadInput("VALUE", "no package of kernels", where="--packages", found=unknown[0],
                       allowed=", ".join(("none", *sorted(PACKAGES))), fix="--packages none")  # fmt: skip
    return frozenset(names)
