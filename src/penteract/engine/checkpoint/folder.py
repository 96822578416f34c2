"""A folder of checkpoints: the names of steps, the newest intact one, commits and removal.

`step-N` is committed. `step-N.tmp` is unfinished or being removed: readers ignore it, and the next save removes it.
`step-N.old` is the old checkpoint of a step that was being replaced: readers use it if `step-N` is missing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import manifest
from penteract.errors import BadInput, CorruptData, PenteractError

log = logging.getLogger("penteract")

LATEST = "latest"
_STEP = re.compile(r"step-([0-9]{8,})(\.old)?")


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's committed checkpoint."""
    return folder / f"step-{step:08d}"


def unfinished(at: Path) -> Path:
    """The folder into which a checkpoint is written before its commit."""
    return at.with_name(f"{at.name}.tmp")


def replaced(at: Path) -> Path:
    """The folder to which a checkpoint is moved while a new one of the same step is committed."""
    return at.with_name(f"{at.name}.old")


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all committed checkpoints, the newest first; `.old` after its replacement."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append((int(name[1]), path))
    return sorted(found, key=lambda sp: (-sp[0], sp[1].name))


def check(at: Path) -> None:
    """Check the manifest, and that files exist with their sizes; bytes are checked when they are read. Raises
    CorruptData."""
    for name, size in manifest.read(at).files.items():
        try:
            found = (at / name).stat().st_size
        except OSError as e:
            raise CorruptData("CHECKPOINT", "a file is missing", where=str(at / name), found=e.strerror) from e
        if found != size:
            raise CorruptData("CHECKPOINT", "a file is truncated or not of its size", where=str(at / name),
                              found=f"{found} bytes", allowed=f"{size} bytes")  # fmt: skip


def latest(folder: Path) -> Path:
    """The newest intact step of `folder`; logs a warning when a newer one is damaged.

    The file `latest` is only for people; it is not read. Raises BadInput when there is no intact checkpoint.
    """
    steps = committed(folder)
    if not steps:
        raise BadInput("CHECKPOINT", "no checkpoint here", where=str(folder), fix="train first, or name another run")
    for _, at in steps:
        try:
            check(at)
        except CorruptData as e:
            log.warning("%s is damaged, trying the one before: %s", at.name, e)
        else:
            return at
    raise BadInput("CHECKPOINT", "no intact checkpoint", where=str(folder), allowed="one that is whole",
                   found="damaged " + ", ".join(at.name for _, at in steps[:8]), fix="start a new run")  # fmt: skip


def clear(folder: Path) -> None:
    """Prepare the folder for a save: finish or remove what an interrupted one left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("step-*.old")):
        at = path.with_name(path.name.removesuffix(".old"))
        disk.remove(path) if at.exists() else disk.rename(path, at)
    for path in folder.glob("step-*.tmp"):
        disk.remove(path)


def commit(folder: Path, step: int) -> Path:
    """Rename `step-N.tmp` to `step-N`. A crash at any point leaves the old or the new checkpoint complete."""
    at = step_folder(folder, step)
    disk.sync(unfinished(at))
    if at.exists():
        disk.rename(at, replaced(at))
    disk.rename(unfinished(at), at)
    disk.replace(folder / LATEST, f"{at.name}\n")
    _discard(replaced(at))
    return at


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove older checkpoints: keep `step`, which was just saved, and the newest intact ones before it, `keep` in all
    (0: all of them).

    Damaged ones do not count. Later steps are kept.
    """
    left = keep - 1
    for at in [p for s, p in committed(folder) if s < step] if keep else []:
        if left > 0 and _intact(at):
            left -= 1
        elif left <= 0:
            _discard(at)


def _discard(at: Path) -> None:
    """Rename a checkpoint so that readers ignore it, then remove it."""
    if at.exists():
        gone = unfinished(at)
        disk.remove(gone)
        disk.rename(at, gone)
        disk.remove(gone)


def _intact(at: Path) -> bool:
    try:
        check(at)
    except PenteractError:
        return False
    return True
