"""A folder of checkpoints: the names of steps, the newest intact one, commits and removal.

`step-N/` is committed. `work-E/` holds what epoch E of the run has not committed or is removing: readers ignore it. An
epoch is one process group's time with the run (`engine/run_folder/lease.py`). Whoever takes a run over first renames
the `work-E/` of the epochs before, so a commit of theirs that comes late fails by itself.
`step-N.old/` is the old checkpoint of a step that was being replaced: readers use it if `step-N/` is missing.
`aside-E/` holds later steps that epoch E set aside when it went back to an earlier one.
"""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import NamedTuple

from penteract.config.files.regular import read_regular
from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import digest
from penteract.errors import BadInput, CorruptData, DiskFailure, PenteractError

log = logging.getLogger("penteract")

LATEST = "latest"
DAMAGED = "the checkpoint is damaged"  # of an error that says how in `found`
EPOCH = "epoch"  # a file of a committed step: the epoch that committed it
PROVEN = "proven"  # a file of a committed step that was read back, and after which a finite step was trained
_STEP = re.compile(r"step-([0-9]{8,})(\.old)?")
_WORK = re.compile(r"work-([0-9]{6,})")


class Committed(NamedTuple):
    """A committed checkpoint. They are ordered by epoch, then by step: a run that went back to an earlier step
    continues from there."""

    epoch: int
    step: int
    at: Path

    @property
    def proven(self) -> bool:
        """Whether it was read back, and a finite step was trained after it."""
        return (self.at / PROVEN).exists()


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's committed checkpoint."""
    return folder / f"step-{step:08d}"


def work_folder(folder: Path, epoch: int) -> Path:
    """The folder of an epoch's unfinished saves."""
    return folder / f"work-{epoch:06d}"


def unfinished(folder: Path, step: int, epoch: int) -> Path:
    """The folder into which a checkpoint is written before its commit."""
    return step_folder(work_folder(folder, epoch), step)


def replaced(at: Path) -> Path:
    """The folder to which a checkpoint is moved while a new one of the same step is committed."""
    return at.with_name(f"{at.name}.old")


def committed(folder: Path) -> list[Committed]:
    """All committed checkpoints, the newest first; `.old` after its replacement."""
    found = list[Committed]()
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append(Committed(_epoch(path), int(name[1]), path))
    return sorted(found, key=lambda c: (-c.epoch, -c.step, c.at.name))


def _epoch(at: Path) -> int:
    """The epoch that committed a step; 0 if no run did, or it cannot be read."""
    return (_read_epoch(at) or 0) if (at / EPOCH).exists() else 0


def _epoch_text(epoch: int, step: int) -> str:
    """The file of an epoch. One flipped bit could make an old step the newest, so it has a digest."""
    return f"{epoch} {digest(f'epoch {epoch} of step {step}'.encode())[:16]}\n"


def _read_epoch(at: Path) -> int | None:
    """The epoch in a step's file; None if it is damaged. The first versions wrote no digest."""
    with contextlib.suppress(OSError, ValueError):
        text = read_regular(at / EPOCH, largest=64).decode("ascii")
        epoch, _, signed = text.partition(" ")
        if not signed and re.fullmatch(r"[0-9]+\n", text):
            return int(text)
        if (name := _STEP.fullmatch(at.name)) and text == _epoch_text(int(epoch), int(name[1])):
            return int(epoch)
    return None


def check(at: Path) -> None:
    """Check the manifest, that the folder's name and epoch are its own, and that files exist with their sizes; bytes
    are checked when they are read. Raises CorruptData."""
    stored, name = manifest.check(at), _STEP.fullmatch(at.name)
    if name and int(name[1]) != stored.step:
        raise CorruptData("CHECKPOINT", "a step has the folder of another", where=str(at),
                          found=f"step {stored.step}", allowed=f"step {int(name[1])}",
                          fix=f"mv {at.name} {step_folder(at.parent, stored.step).name}")  # fmt: skip
    if name and (at / EPOCH).exists() and _read_epoch(at) is None:
        raise CorruptData("CHECKPOINT", "its epoch is damaged", where=str(at / EPOCH),
                          fix="remove this step's folder: the one before is used then")  # fmt: skip
    for file, size in stored.files.items():
        try:
            found = (at / file).stat().st_size
        except OSError as e:
            raise CorruptData("CHECKPOINT", "a file is missing", where=str(at / file), found=e.strerror) from e
        if found != size:
            raise CorruptData("CHECKPOINT", "a file is truncated or not of its size", where=str(at / file),
                              found=f"{found} bytes", allowed=f"{size} bytes")  # fmt: skip


def intact(folder: Path) -> list[Path]:
    """The steps of `folder` that `check` finds intact, the newest first; logs a warning for each damaged one that is
    newer than the first of them. Raises BadInput when there is none."""
    steps, found = committed(folder), list[Path]()
    if not steps:
        raise BadInput("CHECKPOINT", "no checkpoint here", where=str(folder), fix="train first, or name another run")
    for _, _, at in steps:
        try:
            check(at)
        except CorruptData as e:
            if not found:
                log.warning("%s is damaged, trying the one before: %s %s", at.name, e.what, e.found)
        else:
            found.append(at)
    if not found:
        raise BadInput("CHECKPOINT", "no intact checkpoint", where=str(folder), allowed="one that is whole",
                       found="damaged " + ", ".join(at.name for _, _, at in steps[:8]),
                       fix="start a new run")  # fmt: skip
    return found


def latest(folder: Path) -> Path:
    """The newest intact step of `folder`. The file `latest` is only for people; it is not read. Raises BadInput when
    there is no intact checkpoint."""
    return intact(folder)[0]


def take(folder: Path, epoch: int) -> None:
    """Begin an epoch: no earlier one can commit from now on, and this one can. Raises DiskFailure if a later one has
    begun."""
    folder.mkdir(parents=True, exist_ok=True)
    epochs = {int(name[1]): path for path in folder.iterdir() if (name := _WORK.fullmatch(path.name))}
    if max([*epochs, *(one.epoch for one in committed(folder))], default=0) > epoch:
        raise _ousted(folder)
    for path in (path for number, path in epochs.items() if number < epoch):
        gone = path.with_name(f"gone-{path.name}-{epoch:06d}")
        with contextlib.suppress(FileNotFoundError):  # that epoch leaves it just now
            disk.rename(path, gone)
        disk.remove(gone)
    with contextlib.suppress(FileExistsError):
        work_folder(folder, epoch).mkdir()
    disk.sync(folder)


def end_epoch(folder: Path, epoch: int) -> None:
    """End an epoch after its last save: remove its empty folder, unless nothing else shows that the epoch was there.
    Never raises OSError."""
    with contextlib.suppress(OSError):
        if any(one.epoch == epoch for one in committed(folder)):
            work_folder(folder, epoch).rmdir()


def clear(folder: Path, epoch: int) -> None:
    """Prepare the folder for a save: finish or remove what an interrupted one left. Raises DiskFailure if a later epoch
    has begun."""
    work = _work(folder, epoch)
    for path in [*work.iterdir(), *folder.glob("gone-*")]:
        disk.remove(path)
    for path in sorted(folder.glob("step-*.old")):
        at = path.with_name(path.name.removesuffix(".old"))
        _discard(path, epoch) if at.exists() else disk.rename(path, at)


def _work(folder: Path, epoch: int) -> Path:
    """The existing folder of an epoch's unfinished saves. Epoch 0 needs no `take`: nobody else saves there."""
    work = work_folder(folder, epoch)
    if epoch == 0:
        work.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        raise DiskFailure("GONE", "the folder of checkpoints is gone", where=str(folder),
                          fix="start a new run, or bring the folder back and resume")  # fmt: skip
    if not work.is_dir():
        raise _ousted(folder)
    return work


def _ousted(folder: Path) -> DiskFailure:
    return DiskFailure("OUSTED", "another process has taken this run over: nothing more is saved", where=str(folder),
                       fix="let only one of them go on")  # fmt: skip


def commit(folder: Path, step: int, epoch: int) -> Path:
    """Rename the unfinished checkpoint to `step-N`. A crash at any point leaves the old or the new one complete."""
    at, fresh = step_folder(folder, step), unfinished(folder, step, epoch)
    if epoch:
        disk.write(fresh / EPOCH, [_epoch_text(epoch, step).encode()])
    disk.sync(fresh)
    if at.exists():
        disk.rename(at, replaced(at))
    disk.rename(fresh, at)
    disk.replace(folder / LATEST, f"{at.name}\n")
    _discard(replaced(at), epoch)
    _tidy(folder, epoch)
    return at


def prove(at: Path) -> None:
    """Mark a checkpoint that was read back, and after which a finite step was trained."""
    if at.is_dir() and not (at / PROVEN).exists():
        disk.write(at / PROVEN, [])


def prune(folder: Path, keep: int, epoch: int = 0) -> None:
    """Remove old checkpoints. The newest `keep` intact ones stay (0: all), and the newest proven one: if none is
    proven, all stay."""
    left, proven = keep, False
    for one in committed(folder) if keep else ():
        if left <= 0 and proven:
            _discard(one.at, epoch)
        elif _intact(one.at):
            left, proven = left - 1, proven or one.proven
    _tidy(folder, epoch)


def set_aside(folder: Path, at: Path, epoch: int) -> list[str]:
    """Before a run goes on from the checkpoint `at`: set newer ones aside. Returns their names."""
    newer = list[Path]()
    for one in committed(folder):
        if one.at == at:
            break
        newer.append(one.at)
    for path in newer:
        aside = folder / f"aside-{epoch:06d}"
        aside.mkdir(exist_ok=True)
        disk.remove(aside / path.name)
        disk.rename(path, aside / path.name)
    disk.replace(folder / LATEST, f"{at.name}\n")
    return [path.name for path in newer]


def _tidy(folder: Path, epoch: int) -> None:
    """Remove the empty folder of epoch 0; those of runs show who may commit."""
    if epoch == 0:
        with contextlib.suppress(OSError):
            work_folder(folder, 0).rmdir()


def _discard(at: Path, epoch: int) -> None:
    """Move a checkpoint to where readers ignore it, then remove it."""
    if at.exists():
        gone = _work(at.parent, epoch) / f"{at.name}.gone"
        disk.remove(gone)
        disk.rename(at, gone)
        disk.remove(gone)


def _intact(at: Path) -> bool:
    try:
        check(at)
    except PenteractError:
        return False
    return True
