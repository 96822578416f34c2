"""Modules that need torch, imported only when a command is about to use it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from penteract.errors import BadInput


def torch_module(module: str, what: str) -> ModuleType:
    """Import `penteract.MODULE`. Raises BadInput where torch is not installed; its line begins with `what`, as in
    "measuring needs"."""
    if find_spec("torch") is None:
        raise BadInput("TORCH", f"{what} torch", found="none", fix="pip install 'penteract[train]'")
    return import_module(f"penteract.{module}")
