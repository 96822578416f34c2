"""Packages that training uses, found by their metadata, without importing them."""

from __future__ import annotations

import re
from importlib import metadata

from penteract.config.rules.kernel_packages import KERNELS
from penteract.engine.doctor.machine import Package

NAMES = ("torch", "numpy", "safetensors", "tokenizers", "datasets", *(name for name, _ in KERNELS))


def packages() -> tuple[Package, ...]:
    """Installed and required versions of the packages that training uses."""
    wanted = _wanted() | {name: f"=={version}" for name, version in KERNELS}
    return tuple(Package(name=name, found=_version(name), wanted=wanted.get(name, "")) for name in NAMES)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _wanted() -> dict[str, str]:
    """This project's requirements by name, such as >=2.11; none if it is not installed but run from its sources."""
    try:
        requirements = metadata.requires("penteract") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9._-]+)\s*\(?([<>=!~][^;)]*)", line) for line in requirements)
    return {m[1]: m[2].strip() for m in found if m}
