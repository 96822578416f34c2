"""Devices, fabrics, nodes and measured curves as data: TOML files, read as plain tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]


def tables(name: str) -> Tables:
    """The file `name`.toml of this folder."""
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text("utf-8"))
