"""Where a run's checkpoints lie: in `RUN/checkpoints`, which is a folder, or a link to `checkpoint.folder`.

A folder outside of the run has a claim: the run's path, and its random name, which the run keeps in `checkpoints.id`.
The claim is created exclusively, so of two runs that start at once, one gets the folder. It is checked before anything
is written there: a link alone could lead anywhere. Both may be moved: a moved run renews its claim, and a moved folder
is found by `--checkpoint.folder`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from shutil import rmtree

from penteract.config.files.regular import read_regular
from penteract.engine.run_folder.exclusive import create_exclusively
from penteract.errors import BadInput, DiskFailure, PenteractError
from penteract.units import printable

NAME, CLAIM, ID = "checkpoints", "claim.json", "checkpoints.id"
INSIDE = "inside"  # the run: the value of `checkpoint.folder` for a folder of no other place
_KEY = "checkpoint.folder"
_LARGEST = 2**16  # bytes of a claim
_OWN = f"a folder of its own for each run: --{_KEY} FOLDER"


def absolute(chosen: str) -> str:
    """`checkpoint.folder` as a run's file keeps it: the run may go on from another working directory. Raises
    BadInput."""
    try:
        return str(Path(chosen).resolve()) if chosen != INSIDE else INSIDE
    except (OSError, ValueError, RuntimeError) as e:  # a loop of links, a null byte
        raise BadInput("FOLDER", "not a folder's name", where=_KEY, found=printable(chosen, 120),
                       fix="check the path") from e  # fmt: skip


def refuse_used_folder(chosen: str, out: str) -> None:
    """Raise BadInput unless `chosen` can become a new run's folder of checkpoints. Changes
    nothing. `out`: the folder of runs."""
    if chosen == INSIDE:
        return
    at = Path(chosen)
    try:
        if Path(out).resolve().is_relative_to(at):
            raise BadInput("FOLDER", "runs lie in this folder", where=_KEY, found=chosen, fix=_OWN)
        if at.exists() and not at.is_dir():
            raise BadInput("FOLDER", "not a folder", where=_KEY, found=chosen, fix=_OWN)
        if (by := _read(at / CLAIM)) is not None:
            raise _claimed(at, by[0])
        if at.is_dir() and any(at.iterdir()):
            raise BadInput("FOLDER", "the folder is not empty, and no run's", where=_KEY, found=chosen, fix=_OWN)
    except OSError as e:
        raise _unusable(at, e) from e


def make(run: Path, chosen: str) -> None:
    """Make the folder of a new run. Raises BadInput if another run has claimed it meanwhile; DiskFailure."""
    elsewhere = chosen != INSIDE
    at = Path(chosen) if elsewhere else run / NAME
    try:
        at.mkdir(parents=elsewhere, exist_ok=elsewhere)
        if elsewhere:
            name = secrets.token_hex(16)
            (run / ID).write_text(f"{name}\n")
            _claim(at, run, name)
            (run / NAME).symlink_to(at)
    except FileExistsError as e:
        raise _claimed(at, (_read(at / CLAIM) or ("another run", ""))[0]) from e
    except OSError as e:
        raise _unusable(at, e) from e


def make_again(run: Path, chosen: str) -> None:
    """Make the folder of a run that has saved nothing, whether or not an earlier start has made it. Raises as `make`
    does."""
    link = run / NAME
    if link.is_symlink():
        release(run)
        with contextlib.suppress(OSError):
            link.unlink()
    if not link.is_dir():
        make(run, chosen)


def leads_to(run: Path, chosen: str) -> bool:
    """Whether the run has `chosen` as its folder already."""
    with contextlib.suppress(OSError, PenteractError):
        return (run / NAME).is_symlink() and os.readlink(run / NAME) == chosen and find(run).is_dir()
    return False


def release(run: Path) -> None:
    """Give up the folder of a run that has saved nothing, so that another may have it. Never raises."""
    with contextlib.suppress(OSError, PenteractError):
        if (run / NAME).is_symlink():
            at = find(run, write=True).resolve()
            if not any([*at.glob("step-*"), *at.glob("aside-*")]):
                for unfinished in at.glob("work-*"):
                    rmtree(unfinished)
                (at / CLAIM).unlink()


def find(run: Path, *, write: bool = False) -> Path:
    """`RUN/checkpoints`. Raises BadInput if it leads to a folder that is missing, or that is not this run's.

    `write`: also if this run is a copy of the one that has it.
    """
    link = run / NAME
    if link.is_symlink():
        _check(run, Path(os.readlink(link)), write=write)
    return link


def of_resumed(run: Path, chosen: str) -> Path:
    """The folder from which a run resumes: `find`, or `chosen`, if it has been moved there. Raises BadInput. Changes
    nothing."""
    link = run / NAME
    now = os.readlink(link) if link.is_symlink() else INSIDE
    if chosen == now == INSIDE:
        return link
    if INSIDE in (chosen, now):
        raise BadInput("FOLDER", "a run keeps its folder of checkpoints", where=_KEY, found=printable(chosen),
                       allowed=printable(now), fix=printable(f"--{_KEY} {now}"))  # fmt: skip
    _check(run, Path(chosen), write=True)
    return Path(chosen)


def settle(run: Path, at: Path) -> None:
    """Let the link and the claim of a resumed run say where both are now. `at`: as `of_resumed` gave it. Raises
    DiskFailure."""
    link = run / NAME
    if not link.is_symlink():
        return
    try:
        if os.readlink(link) != str(at):
            fresh = run / f".{NAME}-{secrets.token_hex(4)}"
            fresh.symlink_to(at)
            fresh.replace(link)
        if (by := _read(at / CLAIM)) is not None and by[0] != str(run.resolve()):
            (at / CLAIM).unlink()
            _claim(at, run, by[1])
    except OSError as e:
        raise _unusable(at, e) from e


def run_of(step: Path) -> Path | None:
    """The run's folder that a step's folder is in, or is claimed for; None if there is none."""
    inside = step.resolve().parent
    by = _read(inside / CLAIM)
    if by is not None and _id(Path(by[0])) == by[1]:
        return Path(by[0])
    return inside.parent if (inside.parent / "run.toml").is_file() else None


def is_missing(run: Path) -> bool:
    """Whether the run's folder of checkpoints lies elsewhere, and is not there."""
    return (run / NAME).is_symlink() and not (run / NAME).is_dir()


def _check(run: Path, at: Path, *, write: bool) -> None:
    if not at.is_dir():
        raise BadInput("CHECKPOINT", "the run's folder of checkpoints is not there", where=str(run), found=str(at),
                       fix=f"mount it or bring it back; if it was moved: penteract train --resume {run} --{_KEY} "
                       "FOLDER")  # fmt: skip
    name, by = _id(run), _read(at / CLAIM)
    if by is None or not name or by[1] != name:
        raise BadInput("CHECKPOINT", "the folder of checkpoints is not this run's", where=str(run), found=str(at),
                       allowed=f"one with its {CLAIM}" if by is None else printable(f"not that of {by[0]}"),
                       fix=f"--{_KEY} with this run's own folder")  # fmt: skip
    if write and Path(by[0]) != run.resolve() and _id(Path(by[0])) == name:
        raise _claimed(at, by[0])


def _claim(at: Path, run: Path, name: str) -> None:
    """Create the claim. Raises FileExistsError."""
    create_exclusively(at / CLAIM, json.dumps({"run": str(run.resolve()), "id": name}) + "\n")


def _read(path: Path) -> tuple[str, str] | None:
    """(path of the run, its name) of a claim; None if there is none. A damaged one is nobody's."""
    if not path.exists():
        return None
    try:
        row = json.loads(read_regular(path, largest=_LARGEST))
        return str(row["run"]), str(row["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return "a run that its claim does not name", ""


def _id(run: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return read_regular(run / ID, largest=100).decode().strip()
    return ""


def _claimed(at: Path, by: str) -> BadInput:
    return BadInput("FOLDER", "another run has this folder of checkpoints", where=_KEY,
                    found=printable(f"{at} of {by}"), fix=printable(f"{_OWN}; or --resume {by}"))  # fmt: skip


def _unusable(at: Path, e: OSError) -> DiskFailure:
    return DiskFailure("DISK", "the folder of checkpoints cannot be used", where=str(e.filename or at),
                       found=e.strerror or str(e), fix=f"choose another --{_KEY}")  # fmt: skip
