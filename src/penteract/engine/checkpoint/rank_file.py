"""A rank's files of a checkpoint, its part of the manifest, and the manifest of all ranks. Needs no torch.

A rank writes its files and makes a table of them; rank 0 gets the tables of all ranks and finishes the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import WIDTHS, Dims, digest_of_parts, dims_of
from penteract.engine.checkpoint.manifest import Manifest, ManifestEntry
from penteract.engine.checkpoint.packing import LARGEST_FILE, FileEntry, PackedFile, packed
from penteract.engine.checkpoint.stored_boxes import DIGEST, StoredBoxes
from penteract.errors import BadInput, BadNumerics, Bug, CorruptData, DiskFailure
from penteract.units import Bytes, show_bytes

_ATTEMPTS = 3  # at writing a file, if the error may pass
_PASSING = (errno.EIO, errno.ESTALE)  # of a network's file system


class TableRow(NamedTuple):
    """A tensor of a rank's table. `numbers`: of each of its rectangles the file, counted in the table's, offset and
    size; `digests`: theirs, as bytes."""

    shape: Dims
    dtype: str
    numbers: list[int]
    digests: bytes


@dataclass(frozen=True, slots=True)
class RankTable:
    """What a rank has written: its files with their sizes, sorted, and the tensors that it holds, with the rectangles
    that it owns. So `merge` notices a tensor that no rank owns."""

    files: Mapping[str, Bytes]
    rows: Mapping[str, TableRow]

    @property
    def tensors(self) -> dict[str, ManifestEntry]:
        """Its rows as a manifest has them."""
        files = [*self.files]
        return {
            name: ManifestEntry(r.shape, r.dtype, StoredBoxes.of_rows(name, r.shape, files, r.numbers, r.digests))
            for name, r in self.rows.items()
        }  # fmt: skip

    def text(self) -> str:
        """As JSON, on one line."""
        rows = {
            name: [r.dtype, r.shape, r.numbers, b2a_base64(r.digests, newline=False).decode()]
            for name, r in self.rows.items()
        }
        return json.dumps({"files": dict(self.files), "tensors": rows}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> RankTable:
        """The output of `text`. Raises ValueError, TypeError, KeyError or AttributeError where it is not valid."""
        content = json.loads(text)
        files = manifest.parse_files(content["files"])
        return cls(files, {name: _row(row, len(files)) for name, row in content["tensors"].items()})


def _row(row: Sequence[Any], files: int) -> TableRow:
    dtype, shape, numbers, digests = row
    found = TableRow(dims_of(shape), dtype, numbers, a2b_base64(digests, strict_mode=True))
    width = 1 + 2 * len(found.shape)
    if dtype not in WIDTHS or len(numbers) * DIGEST != len(found.digests) * width:
        raise ValueError("not a row of a rank's table")
    if numbers and not 0 <= min(numbers[::width]) <= max(numbers[::width]) < files:
        raise ValueError("a file that is not in a rank's table")
    return found


def merge(tables: Sequence[RankTable]) -> tuple[dict[str, Bytes], dict[str, ManifestEntry]]:
    """All ranks' files, sorted, and their tensors as one. Raises Bug when a tensor's rectangles do not tile it
    exactly."""
    sizes = {name: size for table in tables for name, size in table.files.items()}
    files = sorted(sizes)
    numbers = {name: number for number, name in enumerate(files)}
    merged = dict[str, _Merged]()
    for table in tables:
        own = [numbers[name] for name in table.files]
        for name, row in table.rows.items():
            if (one := merged.get(name)) is None:
                one = merged[name] = _Merged(row.shape, row.dtype)
            if (one.shape, one.dtype) != (row.shape, row.dtype):
                raise Bug("CHECKPOINT", "ranks disagree about a tensor", where=name,
                          found=f"{row.dtype} {row.shape}", allowed=f"{one.dtype} {one.shape}")  # fmt: skip
            width = 1 + 2 * len(row.shape)
            one.file += [own[i] for i in row.numbers[::width]]
            one.numbers += row.numbers
            one.digests.append(row.digests)
    entries = dict[str, ManifestEntry]()
    for name in [*merged]:
        one = merged.pop(name)
        boxes = StoredBoxes.of_rows(name, one.shape, files, one.numbers, b"".join(one.digests))
        entries[name] = ManifestEntry(one.shape, one.dtype, replace(boxes, file=np.array(one.file, np.int64)))
        if problem := boxes.untiled():
            raise Bug("CHECKPOINT", "a tensor's owned rectangles do not tile it", where=name, found=problem,
                      allowed=f"each element of {one.shape} once")  # fmt: skip
    return {name: sizes[name] for name in files}, entries


@dataclass(slots=True)
class _Merged:
    """A tensor of all ranks so far."""

    shape: Dims
    dtype: str
    file: list[int] = field(default_factory=list[int])
    numbers: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])


def write(
    fresh: Path, entries: Sequence[FileEntry], rank: int, threads: int = 1, largest: Bytes = LARGEST_FILE
) -> RankTable:
    """Write this rank's files, of at most `largest` bytes each, into the folder `fresh`, if it owns any of these, and
    sync them. Raises OSError, after some attempts where the error may pass; DiskFailure where there is no room;
    BadNumerics."""
    files = packed(entries, rank, largest)
    need = sum(file.bytes for file in files)
    if need > (free := disk.room(fresh).bytes):
        raise DiskFailure("DISK", "no room for a checkpoint", where=str(fresh), found=f"{show_bytes(free)} free",
                          allowed=f"{show_bytes(need)} for rank {rank}", fix="free some space")  # fmt: skip
    rows = {e.name: TableRow(e.shape, e.dtype, [], b"") for e in entries}
    numbers = {name: number for number, name in enumerate(sorted(file.name for file in files))}
    try:
        for file in files[1:]:  # the first reserves its own when it is written
            _reserve(fresh / file.name, file.bytes)
        for file in files:
            digests = _write(fresh / file.name, file, threads)
            for e in file.entries:
                row = rows[e.name]
                row.numbers.extend((numbers[file.name], *e.box[0], *e.box[1]))
                rows[e.name] = row._replace(digests=row.digests + digests[e.key])
    except (OSError, BadNumerics):
        for file in files:  # those that are whole only take space
            _unlink(fresh / file.name)
        raise
    sizes = {file.name: file.bytes for file in files}
    return RankTable({name: sizes[name] for name in numbers}, rows)


def _reserve(path: Path, size: Bytes) -> None:
    attempt(lambda: disk.reserve(path, size), path)


def _write(path: Path, file: PackedFile, threads: int) -> dict[str, bytes]:
    """Write a file; key -> digest of its entries."""
    digests = dict[str, bytes]()

    def parts() -> Iterator[disk.Part]:
        yield disk.Part(0, [file.header])
        at = len(file.header)
        for e in file.entries:
            yield disk.Part(at, _digested(e, digests))
            at += e.bytes

    attempt(lambda: disk.write_parts(path, [*parts()], file.bytes, threads=threads), path)
    return digests


def attempt(write: Callable[[], int], path: Path) -> int:
    """`write()` the file at `path`; again, where the error may pass. Raises OSError; nothing incomplete stays."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return write()
        except OSError as e:
            _unlink(path)  # an incomplete file only takes space; the next attempt makes a new one
            if not left or e.errno not in _PASSING:
                raise
    raise AssertionError("unreachable")


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def not_finite(name: str) -> BadNumerics:
    """What is raised for a tensor with a value that is not finite."""
    return BadNumerics("NUMERICS", "a value that is not finite: nothing of this step is saved", where=name,
                       fix="a smaller --optimizer.learning_rate; --resume continues from the last checkpoint, "
                       "if there is one")  # fmt: skip


def finish(fresh: Path, step: int, extra: dict[str, Any], tables: Sequence[RankTable]) -> None:
    """Merge the ranks' tables, check that rectangles tile each tensor, and write the manifest, which is read once: what
    a reader would refuse is not committed. Raises BadInput or DiskFailure for that, and OSError."""
    try:
        text, rectangles = Manifest(step, extra, *merge(tables)).encoded()
    except (TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "the extra values are not JSON", where="extra", found=str(e)) from e
    disk.write(fresh / manifest.RECTANGLES, rectangles)
    disk.write(fresh / manifest.MANIFEST, [text])
    try:
        manifest.check(fresh)
    except CorruptData as e:
        raise DiskFailure("DISK", "a checkpoint that no reader would take is not committed", where=e.where,
                          found=f"{e.what}: {e.found}",
                          fix="look at this disk, or choose another --checkpoint.folder; the last checkpoint is "
                          "intact") from e  # fmt: skip


def _digested(e: FileEntry, digests: dict[str, bytes]) -> Iterator[bytes | memoryview]:
    digest = digest_of_parts()
    for part in e.parts():
        digest.update(part)
        yield part
    digests[e.key] = digest.digest()
