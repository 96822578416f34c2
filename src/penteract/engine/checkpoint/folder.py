"""A folder of checkpoints: names of steps, which are intact, which may go.

`step-N` is committed. `step-N.tmp` is unfinished or being removed: readers pass it by, the next save removes it.
`step-N.old` is an older save of a step that was being replaced: it counts where `step-N` is not there.
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
    """Where the checkpoint of a step is, once it is committed."""
    return folder / f"step-{step:08d}"


def unfinished(at: Path) -> Path:
    """Where a checkpoint is written until it is committed."""
    return at.with_name(f"{at.name}.tmp")


def replaced(at: Path) -> Path:
    """Where a checkpoint waits while its successor is committed in its place."""
    return at.with_name(f"{at.name}.old")


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that were committed, the newest first; `.old` after its successor."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append((int(name[1]), path))
    return sorted(found, key=lambda sp: (-sp[0], sp[1].name))


def check(at: Path) -> None:
    """Manifest whole, files there and of their size; bytes are checked when they are read. Raises CorruptData."""
    for name, size in manifest.read(at).files.items():
        try:
            found = (at / name).stat().st_size
        except OSError as e:
            raise CorruptData("CHECKPOINT", "a file is missing", where=str(at / name), found=e.strerror) from e
        if found != size:
            raise CorruptData("CHECKPOINT", "a file is truncated or not of its size", where=str(at / name),
                              found=f"{found} bytes", allowed=f"{size} bytes")  # fmt: skip


def latest(folder: Path) -> Path:
    """The newest intact step of `folder`; says so when a newer one is damaged.

    The file `latest` is for people: what counts is what is there. Raises BadInput when nothing intact is there.
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
    """Make room for a save: what an interrupted one left is finished or removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("step-*.old")):
        at = path.with_name(path.name.removesuffix(".old"))
        disk.remove(path) if at.exists() else disk.rename(path, at)
    for path in folder.glob("step-*.tmp"):
        disk.remove(path)


def commit(folder: Path, step: int) -> Path:
    """`step-N.tmp` becomes `step-N`. A crash at any point leaves the old or the new step whole."""
    at = step_folder(folder, step)
    disk.sync(unfinished(at))
    if at.exists():
        disk.rename(at, replaced(at))
    disk.rename(unfinished(at), at)
    disk.replace(folder / LATEST, f"{at.name}\n")
    _discard(replaced(at))
    return at


def prune(folder: Path, step: int, keep: int) -> None:
    """Keep step `step`, just saved, and the newest intact ones before it, `keep` in all (0: every one).

    Damaged ones do not count. Later steps stay: they are of no concern to this save.
    """
    left = keep - 1
    for at in [p for s, p in committed(folder) if s < step] if keep else []:
        if left > 0 and _intact(at):
            left -= 1
        elif left <= 0:
            _discard(at)


def _discard(at: Path) -> None:
    """Out of sight in one operation, then removed."""
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
