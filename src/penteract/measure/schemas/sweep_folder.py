"""The folder of a sweep: reading it while it is written, and replacing single files of it as a whole."""

from __future__ import annotations

import errno
import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from penteract.config.files.regular import read_regular
from penteract.errors import BadInput, CorruptData, DiskFailure
from penteract.measure.schemas.sweep import (
    ENDED,
    SCHEMA,
    CaseHandle,
    CaseResult,
    CaseStatus,
    Sweep,
    SweepCase,
    SweepRow,
    SweepSettings,
)
from penteract.measure.schemas.typed_json import from_json

_T = TypeVar("_T")
_LARGEST = 2**26  # bytes of a file
SETTINGS, CASES = "sweep.json", "cases"


@dataclass(frozen=True, slots=True)
class CaseFolder:
    """The files of one case."""

    path: Path

    @property
    def run_file(self) -> Path:
        """The run in full."""
        return self.path / "run.toml"

    def attempt(self, number: int) -> Path:
        """The folder of an attempt, from 1."""
        return self.path / f"attempt-{number}"

    def case(self) -> SweepCase:
        """What the case is. Raises CorruptData."""
        return _needed(self.path / "case.json", SweepCase)

    def status(self) -> CaseStatus:
        """How far it is; pending where no status was written. Raises CorruptData."""
        return _read(self.path / "status.json", CaseStatus) or CaseStatus()

    def result(self) -> CaseResult | None:
        """What was measured, if it was. Raises CorruptData."""
        return _read(self.path / "result.json", CaseResult)

    def handle(self, attempt: int) -> CaseHandle | None:
        """How an attempt is found again; None if it was not started. Raises CorruptData."""
        return _read(self.attempt(attempt) / "job.json", CaseHandle)

    def write_handle(self, attempt: int, handle: CaseHandle) -> None:
        """Remember how an attempt is found again. Raises DiskFailure."""
        write_json(self.attempt(attempt) / "job.json", asdict(handle))

    def row(self) -> SweepRow:
        """All of that. The status is read first: when it says done, the result is there."""
        status = self.status()
        result = self.result()
        good = result is not None and status.state == "done" and result.attempt == status.attempt
        return SweepRow(case=self.case(), status=status, result=result if good else None)

    def make(self, case: SweepCase, run_file: str) -> None:
        """Write what a case is. Raises DiskFailure."""
        self.write_case(case)
        write_text(self.run_file, run_file)

    def write_case(self, case: SweepCase) -> None:
        """Replace what a case is: its limit may change. Raises DiskFailure."""
        write_json(self.path / "case.json", asdict(case))

    def write_status(self, status: CaseStatus) -> None:
        """Replace the status. Raises DiskFailure."""
        write_json(self.path / "status.json", asdict(status))

    def write_result(self, result: CaseResult) -> None:
        """Write what was measured; `write_status` with done comes after it. Raises DiskFailure."""
        write_json(self.path / "result.json", asdict(result))

    def ends(self, status: CaseStatus) -> bool:
        """End an attempt with this status, unless it has ended before or a later attempt has begun. -> whether it was
        written."""
        now = self.status()
        if now.attempt != status.attempt or now.state in ENDED:
            return False
        self.write_status(status)
        return True


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The files of a sweep."""

    path: Path

    def case(self, name: str) -> CaseFolder:
        """The folder of a case."""
        return CaseFolder(self.path / CASES / name)

    @property
    def exists(self) -> bool:
        """Whether there is a sweep. Its settings are written last."""
        return (self.path / SETTINGS).is_file()

    def settings(self) -> SweepSettings:
        """Raises BadInput where there is no sweep; CorruptData, also for the name of a case that is no folder's."""
        if not self.exists:
            raise BadInput("SWEEP", "not the folder of a sweep", where=str(self.path), found=f"no {SETTINGS}",
                           fix="name a folder that `penteract bench` made")  # fmt: skip
        found = _needed(self.path / SETTINGS, SweepSettings)
        for name in found.cases:
            if name in ("", ".", "..") or {*name} & {*"/\\\0"}:  # a file of others may name a folder elsewhere
                raise CorruptData("SWEEP", "not the name of a case", where=str(self.path / SETTINGS), found=name[:80],
                                  allowed="the name of a folder in cases")  # fmt: skip
        return found

    def write_settings(self, settings: SweepSettings) -> None:
        """Replace the settings. Raises DiskFailure."""
        write_json(self.path / SETTINGS, asdict(settings))

    def read(self) -> Sweep:
        """The whole sweep as it is now. Raises BadInput, CorruptData."""
        settings = self.settings()
        return Sweep(settings=settings, rows=tuple([self.case(name).row() for name in settings.cases]))


def now() -> str:
    """UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace a file by one object with the schema. Numbers that are not finite raise ValueError."""
    write_text(path, json.dumps({"schema": SCHEMA, **values}, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: readers find the old content or the new one. Raises DiskFailure.

    Written next to its place under a name that no other process has, synced, and renamed: also NFS does that in one
    operation.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as e:
        with suppress(OSError):
            fresh.unlink()
        raise DiskFailure("DISK", "could not write a file of the sweep", where=str(path), found=e.strerror,
                          fix="free some space, or another --out; the same command goes on") from e  # fmt: skip


def _needed(path: Path, kind: type[_T]) -> _T:
    found = _read(path, kind)
    if found is None:
        raise CorruptData("SWEEP", "a file of the sweep is missing", where=str(path),
                          fix="bring it back, or start the sweep in another --out")  # fmt: skip
    return found


def _read(path: Path, kind: type[_T]) -> _T | None:
    """The value in a file; None where there is none."""
    try:
        values: object = json.loads(_bytes(path))
        if not isinstance(values, dict) or cast("dict[str, Any]", values).get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return from_json(kind, cast("dict[str, Any]", values))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise CorruptData("SWEEP", "cannot read a file of the sweep", where=str(path), found=str(e)[:120],
                          fix="remove the file's folder to run the case again") from None  # fmt: skip


def _bytes(path: Path) -> bytes:
    """The content. NFS forgets a file that was replaced while it was opened: it is opened again."""
    try:
        return read_regular(path, largest=_LARGEST)
    except OSError as e:
        if e.errno != errno.ESTALE:
            raise
        return read_regular(path, largest=_LARGEST)
