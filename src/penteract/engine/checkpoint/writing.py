"""Save a checkpoint: every rank writes the slices that it owns, rank 0 checks that they are complete and commits them
by a rename."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import rank_file
from penteract.engine.checkpoint.boxes import inside
from penteract.engine.checkpoint.folder import clear, commit, step_folder, unfinished
from penteract.engine.checkpoint.packing import LARGEST_FILE, FileEntry
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.engine.checkpoint.slices import NAMES, Slice, raw
from penteract.errors import Bug, DiskFailure

_PART = 2**24  # elements of a tensor that are copied from a device at a time


def save(  # noqa: PLR0913 -- the last six describe the run and the calling rank
    folder: Path, step: int, slices: Iterable[Slice], extra: dict[str, Any],
    *, rank: int, world: int, barrier: Callable[[], None], epoch: int = 0, finite: bool = False,
    threads: int = 1,
) -> Path:  # fmt: skip
    """Commit a checkpoint of `step` below `folder`.

    Called by every rank with its own slices; all other arguments but `rank` are the same. `extra` is JSON that `load`
    returns. Files are written to a folder of the run's `epoch`, which is renamed when all are on the disk, so two saves
    never mix. An existing checkpoint of the same step is replaced as a whole. `barrier` waits for all ranks; a rank
    that fails does not reach it. `finite`: refuse to commit values that are not finite. `threads`: of this rank,
    to copy, hash and write.
    Raises DiskFailure; BadNumerics; Bug when the owned rectangles do not tile each tensor.
    """
    fresh = unfinished(folder, step, epoch)
    if rank == 0:
        with disk.failing(folder, "prepare a checkpoint's folder"):
            clear(folder, epoch)
            fresh.mkdir()
    barrier()
    with disk.failing(fresh, "write a checkpoint"):
        _write_share(fresh, slices, rank, finite=finite, threads=threads)
    barrier()
    if rank == 0:
        with disk.failing(fresh, "commit a checkpoint"):
            _finish(fresh, step, extra, world)
            commit(folder, step, epoch)
    barrier()
    return step_folder(folder, step)


def save_alone(folder: Path, step: int, shares: Iterable[Iterable[Slice]], extra: dict[str, Any]) -> Path:
    """Commit a checkpoint of `step` from one process. Each of `shares` becomes the files of a rank, one after another.

    Each share is released before the next is taken, so that a model larger than memory can be written.
    """
    fresh = unfinished(folder, step, 0)
    count = 0
    with disk.failing(fresh, "write a checkpoint"):
        clear(folder, 0)
        fresh.mkdir()
        for share in shares:
            _write_share(fresh, share, count)
            count += 1
        _finish(fresh, step, extra, count)
        return commit(folder, step, 0)


def _share_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _write_share(fresh: Path, slices: Iterable[Slice], rank: int, *, finite: bool = False, threads: int = 1) -> None:
    """Write this rank's files, if it owns any slices, and its part of the manifest."""
    entries = [entry(s, finite=finite) for s in slices]
    text = rank_file.write(fresh, entries, rank, threads, LARGEST_FILE).text()
    path = fresh / _share_of(rank)
    rank_file.attempt(lambda: disk.write(path, [text.encode()]), path)


def entry(s: Slice, *, finite: bool) -> FileEntry:
    """A slice as it is written. `finite`: its content raises BadNumerics at a value that is not."""
    if s.tensor.dtype not in NAMES or not inside(s.box, s.shape):
        raise Bug("CHECKPOINT", "a slice lies outside its tensor, or its dtype cannot be stored", where=s.name,
                  found=f"{s.tensor.dtype} {s.offset} {tuple(s.tensor.shape)} of {s.shape}")  # fmt: skip

    def content(begin: int, end: int) -> Iterator[memoryview]:
        for part in _host_parts(s.tensor, begin, end):
            if finite and not _is_finite(part):
                raise rank_file.not_finite(s.name)
            yield raw(part)

    return FileEntry(s.name, tuple(s.shape), s.box, NAMES[s.tensor.dtype], s.owner, content)


def _host_parts(x: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """These elements on the host, part by part, so that several threads that copy one from a GPU need little memory."""
    flat = x.view(-1) if x.is_contiguous() else x.cpu().reshape(-1)
    yield from (part.cpu() for part in flat[begin:end].split(_PART))


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite; in one pass without a temporary. Whole numbers are."""
    if not values.is_floating_point() or not values.numel():
        return True
    return all(map(math.isfinite, (x.item() for x in values.aminmax())))


def _finish(fresh: Path, step: int, extra: dict[str, Any], world: int) -> None:
    """Finish a checkpoint from the tables that ranks left beside their files."""
    tables = list[RankTable]()
    for rank in range(world):
        path = fresh / _share_of(rank)
        try:
            text = path.read_bytes()
            json.loads(text)
        except (FileNotFoundError, ValueError) as e:
            raise DiskFailure("DISK", f"rank 0 does not see the files of rank {rank}", where=str(path),
                              fix="choose an --output.folder that all hosts share") from e  # fmt: skip
        tables.append(RankTable.parse(text))
    rank_file.finish(fresh, step, extra, tables)
    for rank in range(world):
        os.unlink(fresh / _share_of(rank))
