"""Save a checkpoint: every rank writes the slices that it owns, rank 0 checks that they are complete and commits them
by a rename."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.folder import clear, commit, step_folder, unfinished
from penteract.engine.checkpoint.manifest import Manifest, ManifestEntry, StoredBox
from penteract.engine.checkpoint.slices import NAMES, Slice, digest, inside, raw, volume
from penteract.errors import BadInput, BadNumerics, Bug, DiskFailure
from penteract.units import show_bytes

_ATTEMPTS = 3  # at writing a file, if the error may pass
_PASSING = (errno.EIO, errno.ESTALE)  # of a network's file system


def save(  # noqa: PLR0913 -- the last five describe the run and the calling rank
    folder: Path, step: int, slices: Iterable[Slice], extra: dict[str, Any],
    *, rank: int, world: int, barrier: Callable[[], None], epoch: int = 0, finite: bool = False,
) -> Path:  # fmt: skip
    """Commit a checkpoint of `step` below `folder`.

    Called by every rank with its own slices; all other arguments but `rank` are the same. `extra` is JSON that `load`
    returns. Files are written to a folder of the run's `epoch`, which is renamed when all are on the disk, so two saves
    never mix. An existing checkpoint of the same step is replaced as a whole. `barrier` waits for all ranks; a rank
    that fails does not reach it. `finite`: refuse to commit values that are not finite.
    Raises DiskFailure; BadNumerics; Bug when the owned rectangles do not tile each tensor.
    """
    fresh = unfinished(folder, step, epoch)
    if rank == 0:
        with disk.failing(folder, "prepare a checkpoint's folder"):
            clear(folder, epoch)
            fresh.mkdir()
    barrier()
    with disk.failing(fresh, "write a checkpoint"):
        _write_share(fresh, slices, rank, finite=finite)
    barrier()
    if rank == 0:
        with disk.failing(fresh, "commit a checkpoint"):
            _finish_manifest(fresh, step, extra, world)
            commit(folder, step, epoch)
    barrier()
    return step_folder(folder, step)


def save_alone(folder: Path, step: int, shares: Iterable[Iterable[Slice]], extra: dict[str, Any]) -> Path:
    """Commit a checkpoint of `step` from one process. Each of `shares` becomes the file of one rank, one after another.

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
        _finish_manifest(fresh, step, extra, count)
        return commit(folder, step, 0)


def file_of(rank: int) -> str:
    """The name of the file in which a rank saves its tensors."""
    return f"rank-{rank:05d}.safetensors"


def _share_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _write_share(fresh: Path, slices: Iterable[Slice], rank: int, *, finite: bool = False) -> None:
    """Write this rank's file, if it owns any slices, and its part of the manifest."""
    held = list(slices)
    for s in held:
        if s.tensor.dtype not in NAMES or not inside(s.box, s.shape):
            raise Bug("CHECKPOINT", "a slice lies outside its tensor, or its dtype cannot be stored", where=s.name,
                      found=f"{s.tensor.dtype} {s.offset} {tuple(s.tensor.shape)} of {s.shape}")  # fmt: skip
    # Wide elements first: then each tensor begins at a multiple of its element's size.
    solid = sorted((s for s in held if s.owner and s.tensor.numel()), key=lambda s: -s.tensor.element_size())
    need = sum(s.tensor.nbytes for s in solid)
    if need > (free := disk.room(fresh).bytes):
        raise DiskFailure("DISK", "no room for a checkpoint", where=str(fresh), found=f"{show_bytes(free)} free",
                          allowed=f"{show_bytes(need)} for rank {rank}", fix="free some space")  # fmt: skip
    for attempt in reversed(range(_ATTEMPTS)):
        try:
            return _write_files(fresh, rank, held, solid, need, finite=finite)
        except OSError as e:
            with contextlib.suppress(OSError):  # an incomplete file only takes space; the next attempt makes a new one
                os.unlink(fresh / file_of(rank))
            if not attempt or e.errno not in _PASSING:
                raise


def _write_files(fresh: Path, rank: int, held: list[Slice], solid: list[Slice], need: int, *, finite: bool) -> None:
    digests, size = dict[str, str](), 0
    if solid:
        size = disk.write(fresh / file_of(rank), _stream(solid, digests, finite=finite), reserve=need)
    share: dict[str, Any] = {"size": size, "tensors": manifest.tensors_json(_table(held, digests, file_of(rank)))}
    disk.write(fresh / _share_of(rank), [json.dumps(share).encode()])


def _key(s: Slice) -> str:
    """The slice's key in its file. A whole tensor has its plain name, so that other readers of safetensors find it in a
    single rank's file."""
    return s.name if s.box[1] == tuple(s.shape) else f"{s.name}@{','.join(map(str, s.offset))}"


def _stream(slices: list[Slice], digests: dict[str, str], *, finite: bool) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time; fills `digests`, key -> digest. `finite`: raise
    BadNumerics at a value that is not."""
    header: dict[str, Any] = {}
    end = 0
    for s in slices:
        if _key(s) in header:
            raise Bug("CHECKPOINT", "a rank owns one rectangle twice", where=_key(s))
        header[_key(s)] = {
            "dtype": NAMES[s.tensor.dtype], "shape": list(s.tensor.shape), "data_offsets": [end, end + s.tensor.nbytes]
        }  # fmt: skip
        end += s.tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for s in slices:
        values = s.tensor.cpu()
        if finite and not _is_finite(values):
            raise BadNumerics("NUMERICS", "a value that is not finite: nothing of this step is saved", where=s.name,
                              fix="a smaller --optimizer.learning_rate; --resume continues from the last checkpoint, "
                              "if there is one")  # fmt: skip
        data = raw(values)
        digests[_key(s)] = digest(data)
        yield data


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite; in one pass without a temporary. Whole numbers are."""
    if not values.is_floating_point() or not values.numel():
        return True
    return all(map(math.isfinite, (x.item() for x in values.aminmax())))


def _table(held: list[Slice], digests: dict[str, str], file: str) -> dict[str, ManifestEntry]:
    """Entries of all tensors that this rank holds, with parts for the slices that it owns. So `merge` notices a tensor
    that no rank owns."""
    table: dict[str, ManifestEntry] = {}
    for s in held:
        mine = (StoredBox(file, _key(s), s.box, digests[_key(s)]),) if s.owner and volume(s.box) else ()
        before = table.get(s.name)
        table[s.name] = ManifestEntry(tuple(s.shape), NAMES[s.tensor.dtype], (before.parts if before else ()) + mine)
    return table


def _finish_manifest(fresh: Path, step: int, extra: dict[str, Any], world: int) -> None:
    """Merge the ranks' tables, check that rectangles tile each tensor, and write `manifest.json`."""
    shares: list[dict[str, ManifestEntry]] = []
    files: dict[str, int] = {}
    for rank in range(world):
        path = fresh / _share_of(rank)
        try:
            share = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError) as e:
            raise DiskFailure("DISK", f"rank 0 does not see the files of rank {rank}", where=str(path),
                              fix="choose an --output.folder that all hosts share") from e  # fmt: skip
        shares.append(manifest.parse_tensors(share["tensors"]))
        if share["size"]:
            files[file_of(rank)] = share["size"]
    whole = Manifest(step, extra, files, manifest.merge(shares))
    try:
        text = whole.text()
    except (TypeError, ValueError) as e:
        raise BadInput("CHECKPOINT", "the extra values are not JSON", where="extra", found=str(e)) from e
    disk.write(fresh / manifest.MANIFEST, [text.encode()])
    for rank in range(world):
        os.unlink(fresh / _share_of(rank))
