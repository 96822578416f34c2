"""Load a checkpoint: fill the rectangles of any layout from the stored ones, and verify the digest of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import Box, digest, first_overlap, inside, volume
from penteract.engine.checkpoint.folder import DAMAGED
from penteract.engine.checkpoint.manifest import Manifest, ManifestEntry
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.engine.checkpoint.slices import DTYPES, NAMES, Slice, raw, view
from penteract.engine.checkpoint.stored_boxes import StoredBox, by_file
from penteract.errors import BadInput, Bug, CorruptData
from penteract.units import Bytes

_SHOWN = 5  # names in a message
_AHEAD: Bytes = 2**30  # of rectangles that a rank reads and has not copied yet


def load(at: Path, wanted: Iterable[Slice], threads: int = 1, stored: Manifest | None = None) -> dict[str, Any]:
    """Fill each wanted tensor in place from the checkpoint `at`; returns the `extra` of `save`. `threads`: how many
    read and verify, ahead of this one, which copies. `stored`: its manifest, if it was read before.

    Only stored rectangles that overlap a wanted one are read. Each has one digest, so it is read as a whole and
    verified before the overlap is copied. Nothing is cast. Names, shapes, dtypes and completeness are checked before
    the first tensor is changed.
    Raises BadInput when the checkpoint is of another model, CorruptData when it is damaged.
    """
    slices = list(wanted)
    stored = stored or manifest.read(at, {s.name for s in slices})
    _refuse_another_model(at, stored, slices)
    copies: dict[str, dict[StoredBox, list[tuple[Slice, Box]]]] = {}
    for s in slices:
        for part, box in overlaps(at, s.name, stored.tensors[s.name], s.box):
            copies.setdefault(part.file, {}).setdefault(part, []).append((s, box))
    for file, parts in copies.items():
        with opened(at / file, next(iter(parts)).key) as handle:
            dtypes = [(part, NAMES[targets[0][0].tensor.dtype]) for part, targets in parts.items()]
            with closing(_read(at / file, handle, dtypes, threads)) as read:  # before the file is closed
                for part, tensor in read:
                    for s, box in parts[part]:
                        view(s.tensor.detach(), box, s.offset).copy_(view(tensor, box, part.box[0]))
    return stored.extra


def _read(
    path: Path, handle: Any, parts: Iterable[tuple[StoredBox, str]], threads: int
) -> Generator[tuple[StoredBox, torch.Tensor]]:
    """Stored rectangles of a file, verified, in order. Digests take longer than anything else here, and let other
    threads run. One at least is read ahead, and no more than `_AHEAD` bytes, as each may be a large part of a model."""
    with ThreadPoolExecutor(threads, "load") as pool:
        ahead, size = deque[tuple[StoredBox, Bytes, Future[torch.Tensor]]](), 0
        try:
            for part, dtype in parts:
                own = volume(part.box) * DTYPES[dtype].itemsize
                while ahead and size + own > _AHEAD:
                    first, less, tensor = ahead.popleft()
                    size -= less
                    yield first, tensor.result()
                ahead.append((part, own, pool.submit(checked, path, handle, part, dtype)))
                size += own
            while ahead:
                first, _, tensor = ahead.popleft()
                yield first, tensor.result()
        finally:
            for _, _, left in ahead:
                left.cancel()


def extra(at: Path) -> dict[str, Any]:
    """The `extra` of `save`; reads no tensor. Raises CorruptData."""
    return manifest.read(at, ()).extra


def verify(at: Path) -> None:
    """Read and verify all tensors. Raises CorruptData at the first that differs from what was written."""
    stored = manifest.read(at)
    for name, entry in stored.tensors.items():
        if problem := entry.parts.untiled():
            raise _damaged(at, f"{name}: {problem}")
    _verify_files(at, stored.files, stored.tensors)


def verify_share(at: Path, table: RankTable, *, prepare: Callable[[Path], None], stop: Callable[[], bool]) -> None:
    """Read and verify the files of one rank by the table that it made when it wrote them, until `stop` says so;
    `prepare(path)` is called before each. Raises CorruptData."""
    _verify_files(at, table.files, table.tensors, prepare, stop)


def _verify_files(
    at: Path, files: Iterable[str], tensors: Mapping[str, ManifestEntry],
    prepare: Callable[[Path], None] = lambda _: None, stop: Callable[[], bool] = bool,
) -> None:  # fmt: skip
    """Read and verify the tensors of these files, which are all of `tensors`. Raises CorruptData."""
    parts_of = by_file(tensors, [*files])
    for file in files:
        if stop():
            return
        prepare(at / file)
        with opened(at / file, "its header") as handle:
            for part, dtype in parts_of(file):
                if stop():
                    return
                checked(at / file, handle, part, dtype)


def _refuse_another_model(at: Path, stored: Manifest, slices: list[Slice]) -> None:
    """Raise BadInput with the first few tensors that are missing, or have another shape or dtype."""
    missing = sorted({s.name for s in slices} - set(stored.tensors))
    if missing:
        there = ", ".join(sorted(stored.tensors)[:_SHOWN])
        raise BadInput("CHECKPOINT", f"{len(missing)} tensors are not in this checkpoint", where=str(at),
                       found="no " + ", ".join(missing[:_SHOWN]), allowed=f"{there}, …",
                       fix="resume with the model that wrote it")  # fmt: skip
    for s in slices:
        if not inside(s.box, s.shape):
            raise Bug("CHECKPOINT", "a slice lies outside its tensor", where=s.name,
                      found=f"{s.offset} {tuple(s.tensor.shape)} of {s.shape}")  # fmt: skip
        entry, dtype = stored.tensors[s.name], NAMES.get(s.tensor.dtype, str(s.tensor.dtype))
        if entry.shape != tuple(s.shape):
            raise BadInput("CHECKPOINT", "a tensor has another shape", where=f"{at.name}: {s.name}", found=entry.shape,
                           allowed=tuple(s.shape), fix="resume with the model that wrote it")  # fmt: skip
        if entry.dtype != dtype:
            raise BadInput("CHECKPOINT", "a tensor has another dtype", where=f"{at.name}: {s.name}", found=entry.dtype,
                           allowed=dtype, fix="resume with the precision that wrote it")  # fmt: skip


def overlaps(at: Path, name: str, entry: ManifestEntry, wanted: Box) -> list[tuple[StoredBox, Box]]:
    """The stored rectangles that overlap the wanted one, each with the overlap. Raises CorruptData unless the overlaps
    tile it."""
    found = entry.parts.overlapping(wanted)
    missing = volume(wanted) - sum(volume(box) for _, box in found)
    if missing or first_overlap(box for _, box in found):
        raise _damaged(at, f"{name}: its rectangles do not tile it")
    return found


@contextmanager
def opened(path: Path, wanted: str) -> Iterator[Any]:
    """Open a safetensors file; `wanted`: the key to read, for the error message."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as e:
        raise _damaged(path, f"{wanted}: {e}") from e


def checked(path: Path, handle: Any, part: StoredBox, dtype: str) -> torch.Tensor:
    """A stored rectangle, verified by its digest. Raises CorruptData if it differs."""
    tensor: torch.Tensor = handle.get_tensor(part.key)
    if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[dtype], part.box[1]) or digest(raw(tensor)) != part.digest:
        raise _damaged(path, f"{part.key}: its bytes are not the ones that were written")
    return tensor


def _damaged(path: Path, found: str) -> CorruptData:
    return CorruptData("CHECKPOINT", DAMAGED, where=str(path), found=found[:300],
                       fix="remove this step's folder: the one before is used then")  # fmt: skip
