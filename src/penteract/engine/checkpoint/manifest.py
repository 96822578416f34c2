"""`manifest.json`: the table of a checkpoint's tensors, with a digest of itself.

The file is not trusted: every field is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penteract.config.files.regular import read_regular
from penteract.engine.checkpoint.boxes import WIDTHS, Box, Dims, digest, first_overlap, inside, show, volume
from penteract.engine.checkpoint.packing import rank_of
from penteract.errors import BadInput, Bug, CorruptData

FORMAT = 1
MANIFEST = "manifest.json"
_LARGEST = 2**30  # bytes of a manifest


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One stored rectangle: tensor `key` of `file`; `digest` is of its bytes."""

    file: str
    key: str
    box: Box
    digest: str

    def as_json(self) -> dict[str, Any]:
        """One entry of `parts` in manifest.json."""
        return {"file": self.file, "key": self.key, "offset": self.box[0], "size": self.box[1], "digest": self.digest}


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One global tensor. `dtype` is the safetensors name."""

    shape: Dims
    dtype: str
    parts: tuple[StoredBox, ...]

    def as_json(self) -> dict[str, Any]:
        """One entry of `tensors` in manifest.json."""
        return {"shape": self.shape, "dtype": self.dtype, "parts": [p.as_json() for p in self.parts]}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint. `files`: name -> bytes."""

    step: int
    extra: dict[str, Any]
    files: Mapping[str, int]
    tensors: Mapping[str, ManifestEntry]

    def text(self) -> str:
        """The content of manifest.json. Its first key is the digest of the others in canonical form."""
        content: dict[str, Any] = {
            "format": FORMAT, "step": self.step, "extra": self.extra, "files": dict(self.files),
            "tensors": {name: entry.as_json() for name, entry in self.tensors.items()},
        }  # fmt: skip
        return json.dumps({"digest": digest(_canonical(content)), **content}, indent=1, allow_nan=False)


def tensors_json(tensors: Mapping[str, ManifestEntry]) -> dict[str, Any]:
    """One rank's part of the table, as JSON."""
    return {name: entry.as_json() for name, entry in tensors.items()}


def merge(shares: Sequence[Mapping[str, ManifestEntry]]) -> dict[str, ManifestEntry]:
    """All ranks' tables as one. Raises Bug when a tensor's rectangles do not tile it exactly."""
    table: dict[str, ManifestEntry] = {}
    for share in shares:
        for name, entry in share.items():
            first = table.get(name, ManifestEntry(entry.shape, entry.dtype, ()))
            if (first.shape, first.dtype) != (entry.shape, entry.dtype):
                raise Bug("CHECKPOINT", "ranks disagree about a tensor", where=name,
                          found=f"{entry.dtype} {entry.shape}", allowed=f"{first.dtype} {first.shape}")  # fmt: skip
            table[name] = ManifestEntry(first.shape, first.dtype, first.parts + entry.parts)
    for name, entry in table.items():
        if problem := untiled(entry):
            raise Bug("CHECKPOINT", "a tensor's owned rectangles do not tile it", where=name, found=problem,
                      allowed=f"each element of {entry.shape} once")  # fmt: skip
    return table


def untiled(entry: ManifestEntry) -> str:
    """What is wrong with an entry's rectangles; empty if they hold each element exactly once."""
    boxes = [part.box for part in entry.parts]
    if outside := next((b for b in boxes if not inside(b, entry.shape)), None):
        return f"{show(outside)} lies outside"
    if pair := first_overlap(boxes):
        return f"{show(pair[0])} and {show(pair[1])} overlap"
    missing = volume((entry.shape, entry.shape)) - sum(map(volume, boxes))
    return f"{missing} elements are missing" if missing else ""


def read(folder: Path) -> Manifest:
    """The manifest of a committed step. Raises CorruptData, or BadInput when a later version wrote it."""
    path = folder / MANIFEST
    try:
        content = json.loads(read_regular(path, largest=_LARGEST))
        claimed = content.pop("digest")
        if claimed != digest(
            _canonical(content)
        ):  # checked first, so that a flipped bit does not look like another version
            raise ValueError("its digest differs")
        if content["format"] != FORMAT:
            raise BadInput(
                "CHECKPOINT", "another version wrote this checkpoint", where=str(path),
                found=f"format {content['format']}", allowed=f"format {FORMAT}", fix="upgrade penteract",
            )  # fmt: skip
        tensors = parse_tensors(content["tensors"])
        files = parse_files(content["files"])
        if strange := {p.file for e in tensors.values() for p in e.parts} - set(files):
            raise ValueError(f"{min(strange)} is not among its files")
        return Manifest(_count(content["step"]), dict(content["extra"]), files, tensors)
    except OSError as e:
        raise CorruptData("CHECKPOINT", "no manifest that can be read", where=str(path), found=e.strerror,
                          fix="use another step's folder") from e  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        found = f"{type(e).__name__}: {e}"[:200]
        raise CorruptData("CHECKPOINT", "the manifest is damaged", where=str(path), found=found,
                          fix="remove this step's folder: the one before is used then") from e  # fmt: skip


def parse_tensors(table: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    """Parse the output of `tensors_json`. Raises ValueError, TypeError, KeyError or AttributeError when it is not
    valid."""
    out: dict[str, ManifestEntry] = {}
    for name, row in table.items():
        if row["dtype"] not in WIDTHS:
            raise ValueError(f"{name}: unknown dtype")
        parts = tuple(_part(p) for p in row["parts"])
        out[name] = ManifestEntry(_dims(row["shape"]), row["dtype"], parts)
        if outside := next((p.box for p in parts if not inside(p.box, out[name].shape)), None):
            raise ValueError(f"{name}{show(outside)} lies outside {out[name].shape}")
    return out


def parse_files(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Names of files with their sizes. Raises ValueError, TypeError or AttributeError when they are not valid."""
    return {_file(name): _count(size) for name, size in sizes.items()}


def _part(row: Mapping[str, Any]) -> StoredBox:
    return StoredBox(
        _file(row["file"]), str(row["key"]), (_dims(row["offset"]), _dims(row["size"])), str(row["digest"])
    )


def _dims(values: Any) -> Dims:
    return tuple(_count(v) for v in values)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _file(name: Any) -> str:
    """A file name of our own form. Raises ValueError for others."""
    rank_of(str(name))
    return str(name)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
