"""Run files and command lines, read into flat keys, each with its origin."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penteract.config.files.keys import SECTIONS, find_key, keys, show_key
from penteract.config.files.parse_toml import parse_toml
from penteract.config.layout import named_fusions
from penteract.errors import BadInput

_LARGEST_FILE = 2**20  # bytes of a run file; a real one has a few thousand
_SPECIAL = ("preset", "model.config")  # where a model comes from, not a value of the run
_LISTS = (  # lists of names; a single name is a list too
    "memory.recompute", "memory.recompute_else", "memory.chosen", "memory.offload", "precision.modules",
    "slurm.setup", "slurm.options", "slurm.container_mounts",
)  # fmt: skip
_JOINED = ("kernels.fuse", "memory.recompute", "memory.recompute_else", "memory.offload")  # plans write a+b

_PAIR = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)+=.*", re.DOTALL)  # a.b=v


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, and where it was set."""

    value: Any
    origin: str


Settings = dict[str, Setting]


def read_text(path: Path, *, largest: int = _LARGEST_FILE) -> str:
    """A text file's content; raises BadInput if it is missing, no regular file, too large or not UTF-8.

    A pipe would be waited for without end, and a device has none.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
            raise BadInput("FILE", f"cannot be read: {what}", where=show_key(str(path)), allowed="a regular file",
                           fix="check the path")  # fmt: skip
        if found.st_size > largest:
            raise BadInput("FILE", "too large to be a configuration", where=str(path), allowed=f"{largest} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInput("FILE", "not a text file", where=str(path), allowed="UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise BadInput("FILE", f"cannot be read: {reason}", where=show_key(str(path)), fix="check the path") from None


def read_toml(path: Path) -> Settings:
    """A run file as flat settings. Keys and types are checked; each origin is `file:line`."""
    text = read_text(path)
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise BadInput(
            "TOML", str(error), where=str(path), fix="correct the syntax; `penteract init` shows it"
        ) from None
    lines = _lines(text)
    found: Settings = {}
    for name, value in _flatten(tree, ""):
        found[name] = _setting(name, value, _origin(name, lines, path.name))
    return found


def origins_in(text: str, file: str) -> Callable[[str], str]:
    """`file:line` of each entry of a TOML text, by its name, as `node.gpus` or `moved.points[3][1]`; `file` where it is
    not found."""
    lines = _lines(text)
    return lambda entry: _origin(entry.partition("[")[0], lines, file)


def _origin(name: str, lines: Mapping[str, int], file: str) -> str:
    line = lines.get(name) or lines.get(name.rsplit(".", 1)[0])
    return f"{file}:{line}" if line else file


def read_overrides(words: Sequence[str]) -> Settings:
    """`--a.b v`, `--a.b=v` and `a.b=v` as flat settings; a later one replaces an earlier one."""
    found: Settings = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        origin = f"--{show_key(name)}"
        if not equals:
            if not word.startswith("--"):
                raise BadInput("USAGE", "not an override", found=show_key(word), allowed="--section.key value")
            if name not in _SPECIAL:
                name = find_key(name, origin).name
            if rest and not is_setting(rest[0]):
                text = rest.pop(0)
            elif name in _SPECIAL or keys()[name].hint is not bool:
                raise BadInput("USAGE", "an override without a value", where=origin, fix=f"{origin} VALUE")
            else:
                text = "true"
        found[name] = _setting(name, _parse(name, text, origin), origin)
    return found


def is_setting(word: str) -> bool:
    """Whether a command-line argument is itself a setting, not the value of the flag before it."""
    return word.startswith("--") or _PAIR.fullmatch(word) is not None


def _setting(name: str, value: object, origin: str) -> Setting:
    if name in _SPECIAL:
        if not isinstance(value, str) or not value:
            raise BadInput("VALUE", "not a value for this key", where=f"{name} ({origin})", allowed="a text")
        return Setting(value, origin)
    return Setting(find_key(name, origin).check(value, origin), origin)


def _parse(name: str, text: str, origin: str) -> object:
    """A command-line value, read as TOML; also a bare word, or a list `a,b`, if the key takes text; and of ops and
    fusions `a+b`, as plans write them."""
    if name in _SPECIAL:
        return text
    forms = find_key(name, origin).forms
    try:
        value: object = parse_toml(f"value = {text}")["value"] if "\n" not in text else text
    except ValueError:
        value = text
    if not isinstance(value, str):
        return text if str in forms and not isinstance(value, list) else cast("object", value)
    if tuple not in forms:
        return value
    words = re.split(r"[,+]" if name in _JOINED else ",", value)
    if len(words) == 1:
        return [value] if name in _LISTS and value not in ("auto", "none", "full", "budget") else value
    parts = [_number(word.strip()) for word in words]
    return named_fusions(parts) if name == "kernels.fuse" else parts


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for part, value in tree.items():
        name = f"{prefix}{part}"
        if isinstance(value, dict) and name in SECTIONS:
            yield from _flatten(cast("dict[str, object]", value), f"{name}.")
        else:
            yield name, value


_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def _lines(text: str) -> dict[str, int]:
    """Dotted key or section -> its first line, for messages (tomllib keeps no positions)."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _bare(header[1]) + "."
            found.setdefault(section[:-1], number)
        elif assignment := _ASSIGNMENT.match(line):
            found.setdefault(section + _bare(assignment[1]), number)
    return found


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
