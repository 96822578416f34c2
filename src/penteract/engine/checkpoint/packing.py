"""A rank's share of a checkpoint as files: which rectangles lie in which file, and where. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from penteract.engine.checkpoint.boxes import WIDTHS, Box, Dims, volume
from penteract.engine.checkpoint.stored_boxes import key_of
from penteract.errors import Bug
from penteract.units import Bytes

LARGEST_FILE: Bytes = 2**32  # what tools and stores take as one, and what is lost and written again with one
_FILE = re.compile(r"rank-([0-9]{5,})(?:-[0-9]{5,})?\.safetensors")
_ALIGN = 8  # bytes: tensors begin at a multiple


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A rectangle of the global tensor `name` of `shape`, as it is written. `dtype`: its name in safetensors. `owner`:
    this rank writes it. `content(begin, end)`: the bytes of these of its elements in order, in parts of any size; it
    raises BadNumerics."""

    name: str
    shape: Dims
    box: Box
    dtype: str
    owner: bool
    content: Callable[[int, int], Iterable[bytes | memoryview]]

    @property
    def key(self) -> str:
        """Its key in the file."""
        return key_of(self.name, self.shape, self.box)

    @property
    def bytes(self) -> Bytes:
        """Bytes in the file."""
        return volume(self.box) * WIDTHS[self.dtype]

    def parts(self) -> Iterable[bytes | memoryview]:
        """All of its bytes."""
        return self.content(0, volume(self.box))

    def cut(self, most: Bytes) -> Iterator[FileEntry]:
        """Itself, or in order parts of at most so many bytes, but of an element at least."""
        begin, whole = 0, self.content
        for box in _cut(self.box, max(1, most // WIDTHS[self.dtype])):
            yield self if box == self.box else replace(self, box=box, content=_from(whole, begin))
            begin += volume(box)


def _from(whole: Callable[[int, int], Iterable[bytes | memoryview]], first: int) -> Callable[[int, int], Any]:
    return lambda begin, end: whole(first + begin, first + end)


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most so many elements, in order: each is contiguous in the whole one."""
    offset, size = box
    if volume(box) <= most:
        yield box
        return
    dim = next(d for d, n in enumerate(size) if n > 1)
    rows = max(1, most // prod(size[dim + 1 :]))
    for at in range(0, size[dim], rows):
        start = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        yield from _cut((start, (*size[:dim], min(rows, size[dim] - at), *size[dim + 1 :])), most)


class PackedFile(NamedTuple):
    """A file as it is written. `header`: its beginning; the bytes of the entries follow in order."""

    name: str
    header: bytes
    entries: Sequence[FileEntry]

    @property
    def bytes(self) -> Bytes:
        """Its size."""
        return len(self.header) + sum(e.bytes for e in self.entries)


def packed(entries: Iterable[FileEntry], rank: int, largest: Bytes) -> list[PackedFile]:
    """The files of what this rank owns of these. Each has at most `largest` bytes, if a row of its header and an
    element fit; an entry that is larger is cut.

    Wide elements come first: then each tensor begins at a multiple of its element's size.
    """
    files, keys = list[list[FileEntry]](), set[str]()
    size = largest  # of the last of the files: there is none yet
    for entry in sorted((e for e in entries if e.owner and e.bytes), key=lambda e: -WIDTHS[e.dtype]):
        for part in entry.cut(largest - _head([entry], largest)):
            if part.key in keys:
                raise Bug("CHECKPOINT", "a rank owns one rectangle twice", where=part.key)
            keys.add(part.key)
            row = _row_bytes(part, largest)
            if size + row + part.bytes > largest:
                files.append([])
                size = _head([], largest)
            files[-1].append(part)
            size += row + part.bytes
    return [PackedFile(file_of(rank, number), _header(parts), parts) for number, parts in enumerate(files)]


def most_files(size: Bytes, world: int) -> int:
    """An upper bound of the files of a checkpoint of `size` bytes: of two that follow each other, one is half full."""
    return world + 2 * size // LARGEST_FILE


def file_of(rank: int, number: int = 0) -> str:
    """The name of a file in which a rank saves its tensors. `number`: of its files."""
    return f"rank-{rank:05d}{f'-{number:05d}' if number else ''}.safetensors"


def rank_of(file: str) -> int:
    """The rank that wrote a file of this name. Raises ValueError for a name that is none of ours, which might lead out
    of the folder."""
    if not (found := _FILE.fullmatch(file)):
        raise ValueError("not the name of one of its files")
    return int(found[1])


def _header(entries: Sequence[FileEntry]) -> bytes:
    """The beginning of a safetensors file: what lies where in it."""
    header: dict[str, Any] = {}
    end = 0
    for e in entries:
        header[e.key] = _row(e, end)
        end += e.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _row(e: FileEntry, at: int) -> dict[str, Any]:
    return {"dtype": e.dtype, "shape": list(e.box[1]), "data_offsets": [at, at + e.bytes]}


def _head(entries: Sequence[FileEntry], largest: Bytes) -> Bytes:
    """At most so many bytes are before the tensors of a file that has these."""
    return 8 + 2 + _ALIGN + sum(_row_bytes(e, largest) for e in entries)


def _row_bytes(e: FileEntry, largest: Bytes) -> Bytes:
    """At most so many bytes of a header are of this entry, or of a part of it, in a file of at most `largest` bytes."""
    name = json.dumps(f"{e.name}@{','.join(map(str, e.shape))}")
    row = {"dtype": e.dtype, "shape": list(e.box[1]), "data_offsets": [largest, largest]}
    return len(name) + len(json.dumps(row, separators=(",", ":"))) + 2
