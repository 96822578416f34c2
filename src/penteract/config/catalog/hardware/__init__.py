"""Devices, fabrics, nodes and measured curves as data: TOML files, read as plain tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]


@cache
def tables(name: str) -> Tables:
    """The file `name`.toml of this folder, which is read once."""
    tree: Tables = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))
    return MappingProxyType({key: MappingProxyType(table) for key, table in tree.items()})
