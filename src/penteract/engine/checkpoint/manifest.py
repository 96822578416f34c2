"""A checkpoint's tables: `manifest.json` has its files and tensors, `rectangles.bin` the rectangles of each tensor.

The manifest has a digest of itself, and for each tensor one of its section of `rectangles.bin`: what repeats (names of
files, keys, shapes) is written once, and a reader reads only the sections of the tensors that it wants. Neither file is
trusted: every field is checked before it is used. Format 1 had all of it in `manifest.json` (`format_1.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penteract.config.files.regular import opened_regular, read_regular
from penteract.engine.checkpoint import format_1
from penteract.engine.checkpoint.boxes import WIDTHS, Dims, count_of, digest, digest_of_parts, dims_of
from penteract.engine.checkpoint.packing import rank_of
from penteract.engine.checkpoint.stored_boxes import StoredBoxes, row_bytes
from penteract.errors import BadInput, CorruptData
from penteract.units import Bytes, show_bytes

FORMATS = (1, 2)  # that are read; the last is written
MANIFEST = "manifest.json"
RECTANGLES = "rectangles.bin"
# The most of each of the two: a damaged or hostile one must not fill the memory. Of 405B parameters on 16,384 ranks
# (zero=3, tp=8) there are up to 19 million rectangles, of 42 bytes: 0.75 GiB. Format 1 took 4.6 GiB for so many.
LARGEST: Bytes = 2**33
_BEGINNING = re.compile(rb'\{"digest":"([0-9a-f]{64})",')  # the rest is the canonical form of the others


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One global tensor. `dtype` is the safetensors name; `parts` is empty where they were not asked for."""

    shape: Dims
    dtype: str
    parts: StoredBoxes

    def bare(self) -> ManifestEntry:
        """The tensor without rectangles."""
        parts = self.parts
        return replace(self, parts=StoredBoxes.of_rows(parts.name, self.shape, parts.files, (), b""))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint. `files`: name -> bytes, sorted; the rectangles of `tensors` count these in their order."""

    step: int
    extra: dict[str, Any]
    files: Mapping[str, int]
    tensors: Mapping[str, ManifestEntry]

    def encoded(self) -> tuple[bytes, list[bytes]]:
        """The content of manifest.json, and of rectangles.bin in parts. Raises TypeError or ValueError if `extra` is
        not JSON; BadInput if readers would refuse their sizes."""
        rows, sections = dict[str, Any](), list[bytes]()
        for name, entry in sorted(self.tensors.items()):
            columns, whole = entry.parts.columns(), digest_of_parts()
            for column in columns:
                whole.update(column)
            rows[name] = {"dtype": entry.dtype, "shape": entry.shape, "rectangles": len(entry.parts),
                          "digest": whole.hexdigest()}  # fmt: skip
            sections += columns
        text = canonical({
            "format": FORMATS[-1], "step": self.step, "extra": self.extra, "files": dict(self.files), "tensors": rows,
        })  # fmt: skip
        text = b'{"digest":"%b",' % digest(text).encode() + text[1:]
        for name, size in ((MANIFEST, len(text)), (RECTANGLES, sum(map(len, sections)))):
            if size > LARGEST:
                raise BadInput("CHECKPOINT", "no reader would take a checkpoint of so many rectangles", where=name,
                               found=show_bytes(size), allowed=show_bytes(LARGEST),
                               fix="fewer ranks that share a parameter: a larger --parallel.pp, or a "
                               "smaller --parallel.shard_group; the last checkpoint is intact")  # fmt: skip
        return text, sections


class Section(NamedTuple):
    """A row of `tensors` in manifest.json: so many rectangles lie in rectangles.bin, after those of the rows before.
    `digest`: of their bytes."""

    shape: Dims
    dtype: str
    rectangles: int
    digest: str


def read(folder: Path, wanted: Container[str] | None = None) -> Manifest:
    """The manifest of a committed step, with the rectangles of the `wanted` tensors; None: of all. Raises CorruptData,
    or BadInput when a later version wrote it."""
    return _read(folder, lambda entries: entries, wanted)


def check(folder: Path) -> Manifest:
    """The manifest without rectangles, each of which was checked: no more than those of one tensor are held. Raises as
    `read`."""
    return _read(folder, lambda entries: ((name, entry.bare()) for name, entry in entries), None)


_Entries = Iterable[tuple[str, ManifestEntry]]


def _read(folder: Path, kept: Callable[[_Entries], _Entries], wanted: Container[str] | None) -> Manifest:
    where = folder / MANIFEST
    try:
        content = _content(where)
        step, extra, files = count_of(content["step"]), dict(content["extra"]), parse_files(content["files"])
        if content["format"] == 1:
            rows = format_1.entries(content.pop("tensors"), [*files])
            return Manifest(step, extra, files, dict(kept((n, ManifestEntry(b.shape, d, b)) for n, d, b in rows)))
        sections = {name: _section(row) for name, row in sorted(content["tensors"].items())}
        where = folder / RECTANGLES
        return Manifest(step, extra, files, dict(kept(_entries(where, sections, [*files], wanted))))
    except OSError as e:
        raise CorruptData("CHECKPOINT", "no manifest that can be read", where=str(where), found=e.strerror,
                          fix="use another step's folder") from e  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as e:
        found = f"{type(e).__name__}: {e}"[:200]
        raise CorruptData("CHECKPOINT", "the manifest is damaged", where=str(where), found=found,
                          fix="remove this step's folder: the one before is used then") from e  # fmt: skip


def _content(path: Path) -> dict[str, Any]:
    """What manifest.json has besides its digest, which is checked first: a flipped bit must not look like another
    version. Raises BadInput for another version; OSError, and what `json` and access to wrong types raise."""
    raw = read_regular(path, largest=LARGEST)
    begins = _BEGINNING.match(raw)
    whole = begins is not None and _digest_of_rest(raw, begins.end()) == begins[1].decode()
    content: dict[str, Any] = json.loads(raw)
    del raw
    claimed = content.pop("digest")
    if not whole and claimed != digest(canonical(content)):  # of format 1, or written anew by another tool
        raise ValueError("its digest differs")
    if content["format"] not in FORMATS:
        raise BadInput(
            "CHECKPOINT", "another version wrote this checkpoint", where=str(path),
            found=f"format {content['format']}", allowed="format " + ", ".join(map(str, FORMATS)),
            fix="upgrade penteract",
        )  # fmt: skip
    return content


def _digest_of_rest(raw: bytes, begin: int) -> str:
    """The digest of a JSON object without its first value, which ends at `begin`: as it is, no value is written
    again."""
    whole = digest_of_parts()
    whole.update(b"{")
    whole.update(memoryview(raw)[begin:])
    return whole.hexdigest()


def _section(row: Mapping[str, Any]) -> Section:
    if row["dtype"] not in WIDTHS:
        raise ValueError("unknown dtype")
    return Section(dims_of(row["shape"]), row["dtype"], count_of(row["rectangles"]), str(row["digest"]))


def _entries(
    path: Path, sections: Mapping[str, Section], files: Sequence[str], wanted: Container[str] | None
) -> Iterator[tuple[str, ManifestEntry]]:
    """The tensors with the rectangles that are `wanted`. Raises OSError or ValueError."""
    at = 0
    with opened_regular(path, largest=LARGEST) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        expected, found = sum(s.rectangles * row_bytes(s.shape, files) for s in sections.values()), os.fstat(fd).st_size
        if found != expected:
            raise ValueError(f"{found} bytes instead of {expected}")
        for name, s in sections.items():
            entry = ManifestEntry(s.shape, s.dtype, StoredBoxes.of_rows(name, s.shape, files, (), b""))
            size = s.rectangles * row_bytes(s.shape, files)
            if wanted is None or name in wanted:
                file.seek(at)
                if digest(data := file.read(size)) != s.digest:
                    raise ValueError(f"{name}: the digest of its rectangles differs")
                entry = replace(entry, parts=StoredBoxes.of_bytes(name, s.shape, files, data))
            at += size
            yield name, entry


def parse_files(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Names of files, sorted, with their sizes. Raises ValueError or TypeError when they are not valid."""
    for name in sizes:
        rank_of(name)  # no others: they might lead out of the folder
    return {name: count_of(sizes[name]) for name in sorted(sizes)}


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON in the one form of which digests are. Raises TypeError or ValueError for what is not JSON."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
