"""A run's directory: everything that is stored about a run.

`runs/2026-11-21_tiny_a1b2c3` holds `run.toml`, `command.txt`, `status.json`, `metrics.jsonl`, `checkpoints/`, `logs/`
and, where something failed, `errors.jsonl`; `runs/latest` points at the newest that has begun to train.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penteract.config.files.run_folder import COMMAND, ERROR_FIELDS, ERRORS, LATEST, RUN, STATUS, command_entry, typed
from penteract.config.files.run_folder import LOGS as LOGS
from penteract.config.resolve.write_run_file import with_device
from penteract.engine.run_folder import checkpoint_folder
from penteract.engine.run_folder.checkpoint_folder import INSIDE
from penteract.errors import BadInput, DiskFailure, PenteractError
from penteract.units import printable

NEXT = "run.next.toml"  # the run file of a resumed run; it replaces RUN once the checkpoint has been read


def free_name(out: str | Path, name: str) -> Path:
    """A path below `out` for a new run, named by day, model and six random digits. Nothing is made."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:64] or "run"
    while True:
        folder = Path(out) / f"{datetime.now().astimezone():%Y-%m-%d}_{plain}_{secrets.token_hex(3)}"
        if not os.path.lexists(folder):
            return folder


def refuse_foreign(folder: Path) -> None:
    """Raise BadInput if a folder holds anything, and is not a run's."""
    try:
        foreign = os.path.lexists(folder) and not (folder / STATUS).is_file() and any(folder.iterdir())
    except OSError as e:
        raise BadInput("FOLDER", "not a folder for a run", where="--into", found=e.strerror, fix="another path") from e
    if foreign:
        raise BadInput("FOLDER", "the folder is not empty, and no run's", where="--into", found=printable(str(folder)),
                       fix="a path that does not exist yet, or a run's folder")  # fmt: skip


def create(
    out: str | Path, name: str, command: str | None = None, checkpoints: str = INSIDE,
    into: Path | None = None,
) -> Path:  # fmt: skip
    """A new run's directory below `out`, named by day, model and six random digits.

    `command`: what to write into `command.txt`; by default the arguments of this process. `checkpoints`: the
    `checkpoint.folder`. `into`: the directory, instead; a run that has saved nothing there begins anew. Raises
    DiskFailure, and BadInput if another run has the folder of checkpoints.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        while True:
            folder = into or free_name(out, name)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=into is not None, exist_ok=into is not None)
                break
        checkpoint_folder.make_again(folder, checkpoints) if into else checkpoint_folder.make(folder, checkpoints)
        (folder / COMMAND).write_text(command_entry(typed(sys.argv) if command is None else command, 1, now()))
        write_status(folder, "created")
    except OSError as e:
        raise _not_made("a run's directory", e, into or out, "--output.folder" if into is None else "--into") from e
    return folder


def make_latest(folder: Path, out: str | Path) -> None:
    """Let `out/latest` point at a run that begins to train: one that is refused as it starts is never the latest. It
    leads to runs in `out` alone. Raises DiskFailure."""
    out = Path(out)
    try:
        if folder.resolve().parent == out.resolve():
            _point(out / LATEST, folder.name)
    except OSError as e:
        raise _not_made("the link to the newest run", e, out) from e


def _not_made(what: str, e: OSError, out: Path, option: str = "--output.folder") -> DiskFailure:
    return DiskFailure("DISK", f"could not make {what}", where=str(e.filename2 or e.filename or out), found=e.strerror,
                       fix=f"choose another {option}")  # fmt: skip


def write_status(folder: Path, state: str, **more: Any) -> None:
    """Replace `status.json` in one operation: the state (queued, created, running, done, stopped, failed) and since
    when.

    A resumed run that has not read its checkpoint yet keeps its old status.
    """
    if (folder / NEXT).exists():
        return
    row = {"state": state, "since": now(), "pid": os.getpid(), **more}
    fresh = folder / f"{STATUS}.tmp"
    fresh.write_text(json.dumps(row) + "\n")
    fresh.replace(folder / STATUS)


def mark_resumed(folder: Path, world: int, command: str = "", step: int = 1) -> None:
    """A resumed run has read its checkpoint: make its new run file the current one, and note the `command` that goes
    on from `step`, where it is known."""
    (folder / NEXT).replace(folder / RUN)
    if command:
        with (folder / COMMAND).open("a") as file:
            file.write(command_entry(command, step, now()))
    write_status(folder, "running", world=world)


def keep_device(folder: Path, device: str) -> None:
    """Note the device of the ranks in the run's file, where it was left open: a run that goes on has the same. Raises
    DiskFailure."""
    file = folder / (NEXT if (folder / NEXT).exists() else RUN)
    try:
        text = file.read_text(encoding="utf-8")
        if (noted := with_device(text, device)) != text:
            fresh = file.with_name(f"{file.name}.tmp")
            fresh.write_text(noted, encoding="utf-8")
            fresh.replace(file)
    except OSError as e:
        raise DiskFailure("DISK", "could not write a run's file", where=str(file), found=e.strerror,
                          fix="free some space") from e  # fmt: skip


def cancel_resume(folder: Path) -> None:
    """Remove the run file of a resume that failed; nothing else has changed."""
    with contextlib.suppress(OSError):
        (folder / NEXT).unlink(missing_ok=True)


def ended(exit_code: int) -> str:
    """The state of a run that ended with this code."""
    return {0: "done", 75: "stopped", 130: "stopped"}.get(exit_code, "failed")


def error_row(error: PenteractError, rank: int, cause: BaseException | None = None, **more: Any) -> dict[str, Any]:
    """The row of `errors.jsonl` for rank `rank`'s failure; with `cause`, the traceback too."""
    trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
    return {**error.as_dict(), "rank": rank, "host": socket.gethostname(), "time": now(), **more, "traceback": trace}


def append_error(folder: Path, row: dict[str, Any]) -> None:
    """Add a row to `errors.jsonl`, in one system call so that ranks' rows do not mix. Never raises OSError."""
    with contextlib.suppress(OSError), (folder / ERRORS).open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def append_unwatched(folder: Path, error: PenteractError, rank: int, cause: BaseException, start: int = 0) -> None:
    """Add the row of a rank that failed before it was watched: not if `errors.jsonl` has rows from byte `start` on."""
    if not errors(folder, start):
        append_error(folder, error_row(error, rank, cause))


def errors_size(folder: Path) -> int:
    """Bytes of `errors.jsonl` so far: rows from earlier attempts of a resumed run."""
    try:
        return (folder / ERRORS).stat().st_size
    except OSError:
        return 0


def errors(folder: Path, start: int = 0) -> list[dict[str, Any]]:
    """Rows of `errors.jsonl` from byte `start`; incomplete ones are left out."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in (folder / ERRORS).read_bytes()[start:].splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.keys() >= ERROR_FIELDS:
                    rows.append(row)
    return rows


def error_line(row: dict[str, Any]) -> str:
    """A row of `errors.jsonl` as the error line that its rank prints."""
    fields = {k: str(row.get(k, "")) for k in ("where", "found", "allowed", "fix")}
    return str(PenteractError(str(row["code"]), str(row["what"]), **fields))


def now() -> str:
    """UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _point(link: Path, target: str) -> None:
    """Make `link` point at `target` in one operation."""
    fresh = link.with_name(f".{link.name}-{target}")
    fresh.symlink_to(target)
    try:
        fresh.replace(link)
    except OSError:
        fresh.unlink()
        raise
