"""Save a checkpoint: every rank writes the slices that it owns. Rank 0 checks that they are complete, and commits the
checkpoint by renaming its folder."""

from __future__ import annotations

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


def save(  # noqa: PLR0913 -- the last seven describe the run and the calling rank
    folder: Path, step: int, slices: Iterable[Slice], extra: dict[str, Any],
    *, rank: int, world: int, barrier: Callable[[], None], epoch: int = 0, finite: bool = False,
    threads: int = 1, written: Callable[[RankTable], None] = lambda _: None,
) -> Path:  # fmt: skip
    """Commit a checkpoint of `step` in `folder`, and return its own folder, `step-…`.

    Every rank calls it with its own slices; all other arguments but `rank` are the same on all ranks. Files are written
    to a temporary folder, which is renamed when all are on the disk. So a save is committed as a whole, and replaces an
    existing checkpoint of the same step as a whole.

    extra    JSON values that `load` returns
    barrier  waits for all ranks; a rank that fails does not reach it
    epoch    the number of the lease under which this process writes (`engine/run_folder/lease.py`), not a pass over the
             data. Each has a temporary folder of its own, so two processes never mix their files
    finite   refuse values that are not finite
    threads  how many this rank uses to copy, hash and write
    written  gets the table of this rank's files, once they are written

    Raises DiskFailure; BadNumerics for a value that is not finite; Bug when the slices do not tile each tensor exactly.
    """
    fresh = unfinished(folder, step, epoch)
    if rank == 0:
        with disk.failing(folder, "prepare a checkpoint's folder"):
            clear(folder, epoch)
            fresh.mkdir()
    barrier()
    with disk.failing(fresh, "write a checkpoint"):
        written(_write_share(fresh, slices, rank, finite=finite, threads=threads))
    barrier()
    if rank == 0:
        with disk.failing(fresh, "commit a checkpoint"):
            _finish(fresh, step, extra, world)
            commit(folder, step, epoch)
    barrier()
    return step_folder(folder, step)


def save_alone(folder: Path, step: int, shares: Iterable[Iterable[Slice]], extra: dict[str, Any]) -> Path:
    """Commit a checkpoint of `step` from one process, as if several ranks had written it, and return its folder.

    `shares` has the slices of each rank. A share is released before the next is taken, so that a model larger than
    memory can be written. `extra`, and what it raises: as `save`.
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


def _table_name(rank: int) -> str:
    """The file in which a rank leaves its part of the manifest for rank 0."""
    return f"rank-{rank:05d}.json"


def _write_share(
    fresh: Path, slices: Iterable[Slice], rank: int, *, finite: bool = False, threads: int = 1
) -> RankTable:
    """Write this rank's files, if it owns any slices, and its part of the manifest."""
    entries = [entry(s, finite=finite) for s in slices]
    table = rank_file.write(fresh, entries, rank, threads, LARGEST_FILE)
    path, text = fresh / _table_name(rank), table.text().encode()
    rank_file.attempt(lambda: disk.write(path, [text]), path)
    return table


def entry(s: Slice, *, finite: bool) -> FileEntry:
    """A slice as an entry of a file, whose bytes are read from the device when they are written. `finite`: reading them
    raises BadNumerics at a value that is not finite. Raises Bug for a slice outside its tensor or a dtype that cannot
    be stored."""
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
    """Elements `begin` to `end` of a tensor, copied to the host in parts, so that threads that copy from a GPU at the
    same time need little memory."""
    flat = x.view(-1) if x.is_contiguous() else x.cpu().reshape(-1)
    yield from (part.cpu() for part in flat[begin:end].split(_PART))


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite: their minimum and maximum are, which takes one pass and no temporary. Integers
    always are."""
    if not values.is_floating_point() or not values.numel():
        return True
    return all(map(math.isfinite, (x.item() for x in values.aminmax())))


def _finish(fresh: Path, step: int, extra: dict[str, Any], world: int) -> None:
    """Write the manifest from the tables that ranks left beside their files, and remove the tables.

    Raises DiskFailure if the table of a rank is not there."""
    tables = list[RankTable]()
    for rank in range(world):
        path = fresh / _table_name(rank)
        try:
            tables.append(RankTable.parse(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise DiskFailure("DISK", f"rank 0 does not see the files of rank {rank}", where=str(path),
                              fix="choose an --output.folder that all hosts share") from e  # fmt: skip
    rank_file.finish(fresh, step, extra, tables)
    for rank in range(world):
        os.unlink(fresh / _table_name(rank))
