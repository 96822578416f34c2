"""A rank's file of a checkpoint, its part of the manifest, and the manifest of all ranks. Needs no torch.

A rank writes its file and makes a table of it; rank 0 gets the tables of all ranks and finishes the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import WIDTHS, Box, Dims, digest_of_parts, volume
from penteract.engine.checkpoint.manifest import Manifest, ManifestEntry, StoredBox
from penteract.errors import BadInput, BadNumerics, Bug, DiskFailure
from penteract.units import show_bytes

_ATTEMPTS = 3  # at writing a file, if the error may pass
_PASSING = (errno.EIO, errno.ESTALE)  # of a network's file system


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A rectangle of the global tensor `name` of `shape`, as it is written. `dtype`: its name in safetensors. `owner`:
    this rank writes it. `content()`: its bytes in order, in parts of any size; it raises BadNumerics."""

    name: str
    shape: Dims
    box: Box
    dtype: str
    owner: bool
    content: Callable[[], Iterable[bytes | memoryview]]

    @property
    def key(self) -> str:
        """Its key in the file. A whole tensor has its plain name, so that other readers of safetensors find it in a
        single rank's file."""
        return self.name if self.box[1] == self.shape else f"{self.name}@{','.join(map(str, self.box[0]))}"

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return volume(self.box) * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class RankTable:
    """What a rank has written: the size of its file (0: none), and the tensors that it holds, with parts for the
    rectangles that it owns. So `merge` notices a tensor that no rank owns."""

    size: int
    tensors: Mapping[str, ManifestEntry]

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"size": self.size, "tensors": manifest.tensors_json(self.tensors)})

    @classmethod
    def parse(cls, text: str | bytes) -> RankTable:
        """The output of `text`. Raises ValueError, TypeError, KeyError or AttributeError where it is not valid."""
        row = json.loads(text)
        return cls(int(row["size"]), manifest.parse_tensors(row["tensors"]))


def file_of(rank: int) -> str:
    """The name of the file in which a rank saves its tensors."""
    return f"rank-{rank:05d}.safetensors"


def write(fresh: Path, entries: Sequence[FileEntry], rank: int, threads: int = 1) -> RankTable:
    """Write this rank's file into the folder `fresh`, if it owns any of these, and sync it. Raises OSError, after some
    attempts where the error may pass; DiskFailure where there is no room; BadNumerics."""
    solid = _solid(entries)
    need = sum(e.bytes for e in solid)
    if need > (free := disk.room(fresh).bytes):
        raise DiskFailure("DISK", "no room for a checkpoint", where=str(fresh), found=f"{show_bytes(free)} free",
                          allowed=f"{show_bytes(need)} for rank {rank}", fix="free some space")  # fmt: skip
    digests, size = dict[str, str](), 0
    if solid:
        header, path = _header(solid), fresh / file_of(rank)

        def parts() -> list[disk.Part]:
            return [disk.Part(0, [header]), *_parts(solid, len(header), digests)]

        size = attempt(lambda: disk.write_parts(path, parts(), len(header) + need, threads=threads), path)
    return RankTable(size, _table(entries, digests, file_of(rank)))


def _solid(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """What this rank writes, wide elements first: then each tensor begins at a multiple of its element's size."""
    return sorted((e for e in entries if e.owner and e.bytes), key=lambda e: -WIDTHS[e.dtype])


class PlannedFile(NamedTuple):
    """The file that a rank would write: its name ("" if it owns nothing), bytes with the header, and rectangles."""

    name: str
    bytes: int
    rectangles: int


def planned(entries: Sequence[FileEntry], rank: int) -> PlannedFile:
    """What `write` would write of these, without their content."""
    solid = _solid(entries)
    if not solid:
        return PlannedFile("", 0, 0)
    return PlannedFile(file_of(rank), len(_header(solid)) + sum(e.bytes for e in solid), len(solid))


def attempt(write: Callable[[], int], path: Path) -> int:
    """`write()` the file at `path`; again, where the error may pass. Raises OSError; nothing incomplete stays."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return write()
        except OSError as e:
            with contextlib.suppress(OSError):  # an incomplete file only takes space; the next attempt makes a new one
                os.unlink(path)
            if not left or e.errno not in _PASSING:
                raise
    raise AssertionError("unreachable")


def not_finite(name: str) -> BadNumerics:
    """What is raised for a tensor with a value that is not finite."""
    return BadNumerics("NUMERICS", "a value that is not finite: nothing of this step is saved", where=name,
                       fix="a smaller --optimizer.learning_rate; --resume continues from the last checkpoint, "
                       "if there is one")  # fmt: skip


def finish(fresh: Path, step: int, extra: dict[str, Any], tables: Sequence[RankTable]) -> None:
    """Merge the ranks' tables, check that rectangles tile each tensor, and write `manifest.json`."""
    files = {file_of(rank): table.size for rank, table in enumerate(tables) if table.size}
    whole = Manifest(step, extra, files, manifest.merge([table.tensors for table in tables]))
    try:
        text = whole.text()
    except (TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "the extra values are not JSON", where="extra", found=str(e)) from e
    disk.write(fresh / manifest.MANIFEST, [text.encode()])


def _header(entries: Sequence[FileEntry]) -> bytes:
    """The beginning of a safetensors file: what lies where in it."""
    header: dict[str, Any] = {}
    end = 0
    for e in entries:
        if e.key in header:
            raise Bug("CHECKPOINT", "a rank owns one rectangle twice", where=e.key)
        header[e.key] = {"dtype": e.dtype, "shape": list(e.box[1]), "data_offsets": [end, end + e.bytes]}
        end += e.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(entries: Sequence[FileEntry], at: int, digests: dict[str, str]) -> Iterator[disk.Part]:
    """The bytes of each tensor, from offset `at` on; fills `digests`, key -> digest, as they are taken."""
    for e in entries:
        yield disk.Part(at, _digested(e, digests))
        at += e.bytes


def _digested(e: FileEntry, digests: dict[str, str]) -> Iterator[bytes | memoryview]:
    digest = digest_of_parts()
    for part in e.content():
        digest.update(part)
        yield part
    digests[e.key] = digest.hexdigest()


def _table(entries: Iterable[FileEntry], digests: dict[str, str], file: str) -> dict[str, ManifestEntry]:
    table: dict[str, ManifestEntry] = {}
    for e in entries:
        mine = (StoredBox(file, e.key, e.box, digests[e.key]),) if e.owner and volume(e.box) else ()
        before = table.get(e.name)
        table[e.name] = ManifestEntry(e.shape, e.dtype, (before.parts if before else ()) + mine)
    return table
