"""A rank's files of a checkpoint, its part of the manifest, and the manifest of all ranks. Needs no torch.

A rank writes its files and makes a table of them; rank 0 gets the tables of all ranks and finishes the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import digest_of_parts
from penteract.engine.checkpoint.manifest import Manifest, ManifestEntry, StoredBox
from penteract.engine.checkpoint.packing import LARGEST_FILE, FileEntry, PackedFile, packed
from penteract.errors import BadInput, BadNumerics, DiskFailure
from penteract.units import Bytes, show_bytes

_ATTEMPTS = 3  # at writing a file, if the error may pass
_PASSING = (errno.EIO, errno.ESTALE)  # of a network's file system


@dataclass(frozen=True, slots=True)
class RankTable:
    """What a rank has written: its files with their sizes, and the tensors that it holds, with parts for the rectangles
    that it owns. So `merge` notices a tensor that no rank owns."""

    files: Mapping[str, Bytes]
    tensors: Mapping[str, ManifestEntry]

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"files": dict(self.files), "tensors": manifest.tensors_json(self.tensors)})

    @classmethod
    def parse(cls, text: str | bytes) -> RankTable:
        """The output of `text`. Raises ValueError, TypeError, KeyError or AttributeError where it is not valid."""
        row = json.loads(text)
        return cls(manifest.parse_files(row["files"]), manifest.parse_tensors(row["tensors"]))


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
    parts = dict[str, list[StoredBox]]()
    try:
        for file in files[1:]:  # the first reserves its own when it is written
            _reserve(fresh / file.name, file.bytes)
        for file in files:
            digests = _write(fresh / file.name, file, threads)
            for e in file.entries:
                parts.setdefault(e.name, []).append(StoredBox(file.name, e.key, e.box, digests[e.key]))
    except (OSError, BadNumerics):
        for file in files:  # those that are whole only take space
            _unlink(fresh / file.name)
        raise
    tensors = {e.name: ManifestEntry(e.shape, e.dtype, tuple(parts.get(e.name, ()))) for e in entries}
    return RankTable({file.name: file.bytes for file in files}, tensors)


def _reserve(path: Path, size: Bytes) -> None:
    attempt(lambda: disk.reserve(path, size), path)


def _write(path: Path, file: PackedFile, threads: int) -> dict[str, str]:
    """Write a file; key -> digest of its entries."""
    digests = dict[str, str]()

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
    """Merge the ranks' tables, check that rectangles tile each tensor, and write `manifest.json`."""
    files = {name: size for table in tables for name, size in table.files.items()}
    whole = Manifest(step, extra, files, manifest.merge([table.tensors for table in tables]))
    try:
        text = whole.text()
    except (TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "the extra values are not JSON", where="extra", found=str(e)) from e
    disk.write(fresh / manifest.MANIFEST, [text.encode()])


def _digested(e: FileEntry, digests: dict[str, str]) -> Iterator[bytes | memoryview]:
    digest = digest_of_parts()
    for part in e.parts():
        digest.update(part)
        yield part
    digests[e.key] = digest.hexdigest()
