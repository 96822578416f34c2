"""Published decoders by name. The shapes are data: a TOML file a family, parsed when a name asks for it.

A family is called as its file, and each of its models' names contains that. A file is a list of series; what a series
says holds for each of its models, which say the rest. Values are held against the same bounds as those of a run file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from math import log
from pathlib import Path
from typing import Any, cast

from penteract.config.files.keys import SECTIONS, keys, show_key
from penteract.config.model import ModelSpec
from penteract.errors import BadInput

FOLDER = Path(__file__).parent / "models"
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SIZE = re.compile(r"(?<![\d.])(?:(?<=-)a)?([1-9]\d{0,5}(?:\.\d{1,3})?|0\.\d{1,3})([mbt])(?![a-z0-9])")
_LONGEST = 200  # of a name that is worth a search for what it may have meant


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """A published model.

    `source`: where its shape was published, a repository of the Hugging Face hub or a paper's table.
    `parameters`: as counted there: without rows that pad the vocabulary, and without blocks that predict further.
    `learning_rate`: the peak it was trained with, where that was published.
    """

    model: ModelSpec
    source: str
    parameters: int
    learning_rate: float | None = None
    aliases: tuple[str, ...] = ()


def model(name: str, *, where: str = "model") -> ModelSpec:
    """The published model called `name`. Raises BadInput as `entry` does."""
    return entry(name, where=where).model


def entry(name: str, *, where: str = "model") -> CatalogEntry:
    """The entry called `name`: its name here, that of its repository (with or without the owner), or an alias.

    Case, spaces, hyphens and underscores do not matter. Raises BadInput with the nearest names when there is none.
    """
    wanted = _folded(name)
    for file in _files(FOLDER):
        if file.stem in wanted:
            for found in _family(file).values():
                if wanted in map(_folded, (found.model.name, found.source, *found.aliases)):
                    return found
    near = nearest(name)
    fix = f"use {near[0]}, or one that penteract plan --models lists" if near else "penteract plan --models lists them"
    raise BadInput("MODEL", "no published model of that name", where=where, found=show_key(name),
                   allowed=", ".join(near), fix=fix)  # fmt: skip


def names() -> tuple[str, ...]:
    """All of them, family by family, each from small to large."""
    return tuple(name for file in _files(FOLDER) for name in _family(file))


def nearest(name: str, *, most: int = 3) -> tuple[str, ...]:
    """Names that `name` probably means, closest first: the nearest series, and in it the nearest size."""
    meant = name[-_LONGEST:]
    folded = {_folded(n): n for n in names()}
    near = [folded[n] for n in get_close_matches(_folded(meant), folded, n=len(folded), cutoff=0.5)]
    series, size = _parted(meant)

    def away(other: str) -> tuple[float, bool, float]:
        their_series, their_size = _parted(other)
        alike = SequenceMatcher(None, series, their_series).ratio()
        slip = _folded(meant).replace(".", "") == _folded(other).replace(".", "")  # 15b for 1.5b
        return -alike, not slip, abs(log(their_size / size)) if size and their_size else 0.0

    return tuple(sorted(near, key=away)[:most])


def _parted(name: str) -> tuple[str, float]:
    """(a name without its sizes, the first of them in parameters or 0): llama-3.1-8b is llama3.1 and 8e9."""
    words = name.rstrip("/").rsplit("/", 1)[-1].lower().translate(str.maketrans(" _", "--"))
    sizes = [float(n) * _UNITS[unit] for n, unit in _SIZE.findall(words)]
    return _folded(_SIZE.sub("", words)), sizes[0] if sizes else 0.0


def _folded(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower().translate(str.maketrans("", "", " -_"))


@cache
def _files(folder: Path) -> tuple[Path, ...]:
    """One file per family, by name."""
    return tuple(sorted(folder.glob("*.toml")))


@cache
def _family(file: Path) -> Mapping[str, CatalogEntry]:
    """The models of one file."""
    tree = tomllib.loads(file.read_text("utf-8"))
    found: dict[str, CatalogEntry] = {}
    for series in tree["series"]:
        models = cast("dict[str, dict[str, Any]]", series.pop("models"))
        found |= {name: _entry(name, {**series, **own}, f"{file.name}: {name}") for name, own in models.items()}
    return found


def _entry(name: str, given: dict[str, Any], origin: str) -> CatalogEntry:
    about = {k: given.pop(k) for k in ("source", "parameters", "learning_rate") if k in given}
    aliases = tuple(given.pop("aliases", ()))
    return CatalogEntry(model=_section("model", {"name": name, **given}, origin), aliases=aliases, **about)


def _section(section: str, given: dict[str, Any], origin: str) -> Any:
    """A table of the file as the dataclass of that section of run files."""
    parts: dict[str, Any] = {}
    for leaf, value in given.items():
        name = f"{section}.{leaf}"
        inner = name in SECTIONS
        parts[leaf] = _section(name, value, origin) if inner else keys()[name].check(value, origin)
    return SECTIONS[section](**parts)
