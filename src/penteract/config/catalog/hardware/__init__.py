"""Devices, fabrics, nodes and measured curves as data: TOML files, read as plain tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parent
Tables = Mapping[str, Mapping[str, Any]]


def tables(name: str) -> Tables:
    """The file `name`.toml of the catalogue's folder, which is read once."""
    return _read(FOLDER / f"{name}.toml")


@cache
def _read(file: Path) -> Tables:
    tree: Tables = tomllib.loads(file.read_text("utf-8"))
    return MappingProxyType({key: MappingProxyType(table) for key, table in tree.items()})
