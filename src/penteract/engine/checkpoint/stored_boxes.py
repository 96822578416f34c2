"""The stored rectangles of a tensor, in columns: those of a large run are millions, and become objects one by one.

On the disk and in memory a column is an array of the narrowest numbers that hold it. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from penteract.engine.checkpoint.boxes import Box, Dims, first_overlap, show
from penteract.units import Bytes

DIGEST: Bytes = 32  # of a digest as bytes
_EXACT = 2**62  # sums of positions stay below: they fit 64 bits


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One stored rectangle: tensor `key` of `file`; `digest` is of its bytes."""

    file: str
    key: str
    box: Box
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredBoxes:
    """Stored rectangles of the tensor `name` of `shape`.

    files   names of files, which `file` counts from 0
    file    [n]
    offset  [n, dims]
    size    [n, dims]
    digest  [n, 32] bytes
    """

    name: str
    shape: Dims
    files: Sequence[str]
    file: Any
    offset: Any
    size: Any
    digest: Any

    @classmethod
    def of_rows(cls, name: str, shape: Dims, files: Sequence[str], rows: Any, digests: bytes) -> StoredBoxes:
        """`rows`: [n, 1 + 2 · dims] of file, offset and size. Raises ValueError where lengths do not agree."""
        dims = len(shape)
        rows = np.asarray(rows, np.int64).reshape(-1, 1 + 2 * dims)
        digest = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST)
        if len(digest) != len(rows):
            raise ValueError(f"{name}: {len(digest)} digests of {len(rows)} rectangles")
        return cls(name, shape, files, rows[:, 0], rows[:, 1 : 1 + dims], rows[:, 1 + dims :], digest)

    @classmethod
    def of_bytes(cls, name: str, shape: Dims, files: Sequence[str], data: bytes) -> StoredBoxes:
        """The inverse of `columns`. Raises ValueError for what is not inside the tensor, or in no file."""
        (file, box), dims = _types(shape, files), len(shape)
        n, at = len(data) // row_bytes(shape, files), 0

        def column(kind: str, width: int) -> Any:
            nonlocal at
            found = np.frombuffer(data, kind, n * width, at)
            at += found.nbytes
            return found.reshape(n, width)

        found = cls(name, shape, files, column(file, 1)[:, 0], column(box, dims), column(box, dims),
                    column("u1", DIGEST))  # fmt: skip
        found.refuse_wrong()
        return found

    def columns(self) -> list[bytes]:
        """Its columns as they are stored."""
        file, box = _types(self.shape, self.files)
        kinds = ((self.file, file), (self.offset, box), (self.size, box), (self.digest, "u1"))
        return [np.ascontiguousarray(column, kind).tobytes() for column, kind in kinds]

    def refuse_wrong(self) -> None:
        """Raise ValueError for a rectangle outside the tensor, or in a file that is not there."""
        if len(self) and not 0 <= int(self.file.min()) <= int(self.file.max()) < len(self.files):
            raise ValueError(f"{self.name}: a file that is not among the checkpoint's")
        if (outside := self.outside()) is not None:
            raise ValueError(f"{self.name}{show(outside)} lies outside {self.shape}")

    def __len__(self) -> int:
        """How many there are."""
        return len(self.file)

    def __getitem__(self, i: int) -> StoredBox:
        """The one at `i`."""
        box = self.box(i)
        return StoredBox(self.files[int(self.file[i])], key_of(self.name, self.shape, box), box,
                         self.digest[i].tobytes().hex())  # fmt: skip

    def __iter__(self) -> Iterator[StoredBox]:
        """All of them in order."""
        return (self[i] for i in range(len(self)))

    def box(self, i: int) -> Box:
        """The rectangle at `i`."""
        return tuple(self.offset[i].tolist()), tuple(self.size[i].tolist())

    def overlapping(self, wanted: Box) -> list[tuple[StoredBox, Box]]:
        """Those that overlap the wanted one, each with the overlap."""
        offset, size = self._wide()
        low, wide = (np.array(part, np.int64) for part in wanted)
        start = np.maximum(offset, low)
        count = np.minimum(offset + size, low + wide) - start
        hits = np.flatnonzero((count > 0).all(axis=1)).tolist()
        return [(self[i], (tuple(start[i].tolist()), tuple(count[i].tolist()))) for i in hits]

    def outside(self) -> Box | None:
        """One that does not lie inside the tensor, if there is any."""
        offset, size = self._wide()
        shape = np.array(self.shape, np.int64)
        wrong = (offset < 0) | (size < 0) | (offset > shape) | (size > shape - offset)
        found = np.flatnonzero(wrong.any(axis=1))
        return self.box(int(found[0])) if len(found) else None

    def untiled(self) -> str:
        """What is wrong with them; empty if they hold each element of the tensor exactly once."""
        if (outside := self.outside()) is not None:
            return f"{show(outside)} lies outside"
        if pair := self._overlap():
            return f"{show(pair[0])} and {show(pair[1])} overlap"
        missing = prod(self.shape) - int(self._wide()[1].prod(axis=1).sum())
        return f"{missing} elements are missing" if missing else ""

    def _wide(self) -> tuple[Any, Any]:
        return self.offset.astype(np.int64), self.size.astype(np.int64)

    def _overlap(self) -> tuple[Box, Box] | None:
        """Two that overlap, if any do.

        Those that do not meet along one dim are in different groups; each group is parted along each dim again. Cuts of
        shards leave groups of one. In others, each is compared with those beside it.
        """
        offset, size = self._wide()
        solid = np.flatnonzero((size > 0).all(axis=1))
        offset, end = offset[solid], (offset + size)[solid]
        group, count = np.zeros(len(solid), np.int64), min(1, len(solid))
        while count < len(solid):
            before = count
            for dim, span in enumerate(self.shape):
                if len(solid) * (span + 1) < _EXACT:
                    group, count = _parted(group, offset[:, dim], end[:, dim], span + 1)
            if count == before:
                break
        if count == len(solid):
            return None
        order = np.argsort(group, kind="stable")
        for one in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            if len(one) > 1 and (pair := first_overlap(self.box(int(solid[i])) for i in one)):
                return pair
        return None


def _parted(group: Any, offset: Any, end: Any, span: int) -> tuple[Any, int]:
    """The groups parted between rectangles that do not meet along one dim, of `span` - 1 elements; and how many there
    are."""
    order = np.lexsort((offset, group))
    group, offset, end = group[order], offset[order], end[order]
    reach = np.maximum.accumulate(end + group * span)[:-1]  # the furthest end so far in each group
    fresh = np.ones(len(order), bool)
    fresh[1:] = (group[1:] != group[:-1]) | (offset[1:] + group[1:] * span >= reach)
    parted = np.empty_like(group)
    parted[order] = np.cumsum(fresh) - 1
    return parted, int(fresh.sum())


class InFiles(Protocol):
    """A tensor of which rectangles are stored."""

    @property
    def dtype(self) -> str:
        """Its name in safetensors."""
        ...

    @property
    def parts(self) -> StoredBoxes:
        """Its rectangles."""
        ...


def by_file(tensors: Mapping[str, InFiles], files: Sequence[str]) -> Callable[[str], Iterator[tuple[StoredBox, str]]]:
    """The rectangles, each with its dtype, of a file; `files` are those of all tensors."""
    parts, dtypes = [t.parts for t in tensors.values()], [t.dtype for t in tensors.values()]
    counts = [len(part) for part in parts]
    file = np.concatenate([np.empty(0, np.int64), *(part.file for part in parts)])
    tensor, first = np.repeat(np.arange(len(parts)), counts), np.cumsum([0, *counts])
    order = np.argsort(file, kind="stable")
    bounds = np.searchsorted(file[order], np.arange(len(files) + 1))
    numbers = {name: number for number, name in enumerate(files)}

    def of(name: str) -> Iterator[tuple[StoredBox, str]]:
        at = numbers[name]
        for i in order[bounds[at] : bounds[at + 1]].tolist():
            t = int(tensor[i])
            yield parts[t][i - int(first[t])], dtypes[t]

    return of


def key_of(name: str, shape: Dims, box: Box) -> str:
    """The key in its file of a rectangle of the tensor `name`. A whole tensor has its plain name, so that other readers
    of safetensors find it in a single rank's file."""
    return name if box[1] == shape else f"{name}@{','.join(map(str, box[0]))}"


def row_bytes(shape: Dims, files: Sequence[str]) -> Bytes:
    """Bytes of a stored rectangle."""
    file, box = _types(shape, files)
    return np.dtype(file).itemsize + 2 * len(shape) * np.dtype(box).itemsize + DIGEST


def _types(shape: Dims, files: Sequence[str]) -> tuple[str, str]:
    """The numbers that hold a file, and a position or size."""
    return _holding(len(files)), _holding(max(shape, default=0))


def _holding(largest: int) -> str:
    return next(f"<u{width}" for width in (1, 2, 4, 8) if largest < 2 ** (8 * width))
