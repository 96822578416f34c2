"""How an attempt at a case ended: from its exit code, its errors, and what its launcher knows."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penteract.errors import Bug, OutOfMemory, PeerLost, Preempted
from penteract.measure.bench.launcher import JobState
from penteract.measure.schemas.sweep import State

_CAUSES: dict[str, State] = {"memory": "out of memory", "time": "timed out", "lost": "lost"}
_STATES: dict[int, State] = {
    OutOfMemory.exit_code: "out of memory",
    PeerLost.exit_code: "lost",
    Preempted.exit_code: "lost",
}
_HANGS = ("HUNG", "UNLIKE")  # codes of PeerLost: nothing was lost, and another attempt would end so again
_LONGEST = 2**16  # bytes of a log's end that are looked at


class AttemptOutcome(NamedTuple):
    """The state of the case, and the error that says why."""

    state: State
    error: dict[str, Any]


def state_of(exit_code: int, code: str = "") -> State:
    """The state of a case whose ranks ended with this exit code, and with an error of this code."""
    return "timed out" if code in _HANGS else _STATES.get(exit_code, "failed")


def outcome(folder: Path, job: JobState) -> AttemptOutcome:
    """How an attempt ended whose ranks did not say so themselves. `folder`: of the attempt."""
    row = _first_error(folder)
    if job.cause:
        return AttemptOutcome(_CAUSES[job.cause], row or _said(job, _CAUSES[job.cause]))
    if row is not None:
        return AttemptOutcome(state_of(int(row["exit_code"]), str(row["code"])), row)
    if job.state == "unknown":
        return AttemptOutcome("lost", _said(job, "its launcher does not know it any more"))
    if not job.exit_code:
        return AttemptOutcome("failed", _said(job, "it ended without a result"))
    return AttemptOutcome(state_of(job.exit_code), _said(job, _last_error(folder)))


def _said(job: JobState, what: str) -> dict[str, Any]:
    about = f"it ended with exit code {job.exit_code}" if job.exit_code else "it ended"
    error = Bug("CASE", what or about, found=job.about, fix="see the logs in the folder of its attempt")
    return error.as_dict() | {"exit_code": job.exit_code}


def _first_error(folder: Path) -> dict[str, Any] | None:
    """The first row of errors.jsonl that is a rank's own; else the first."""
    rows = list[dict[str, Any]]()
    with suppress(OSError):
        for line in (folder / "errors.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    rows = [row for row in rows if {"code", "what", "exit_code"} <= row.keys()]
    own = [row for row in rows if row["exit_code"] != PeerLost.exit_code]
    first = next(iter([*own, *rows]), None)
    return first and {k: v for k, v in first.items() if k != "traceback"}


def _last_error(folder: Path) -> str:
    """The last error line of the launcher's log, without its mark."""
    with suppress(OSError):
        lines = (folder / "launcher.log").read_bytes()[-_LONGEST:].decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error[")), lines[-1] if lines else "")[:300]
    return ""
