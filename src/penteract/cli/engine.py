"""Modules of the engine, imported only when a command is about to use torch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from penteract.errors import BadInput


def engine(module: str, what: str) -> ModuleType:
    """`penteract.engine.MODULE`. Raises BadInput where torch is not installed: `what` needs it."""
    if find_spec("torch") is None:
        raise BadInput("TORCH", f"{what} torch", found="none", fix="pip install 'penteract[train]'")
    return import_module(f"penteract.engine.{module}")
