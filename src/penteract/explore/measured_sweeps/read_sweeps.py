"""Folders of sweeps: which there are, and their cases. All of it may be written meanwhile, or by strangers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from penteract.config.files.regular import read_regular
from penteract.errors import PenteractError
from penteract.measure.schemas.sweep import Sweep, SweepRow
from penteract.measure.schemas.sweep_folder import CASES, SETTINGS, SweepFolder

_FILES = ("case.json", "status.json", "result.json")  # of a case, that are read
_MOST = 200  # sweeps that are listed, the newest
_LARGEST = 2**24  # bytes of a file of settings
Key = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class FoundSweep:
    """A sweep of the folder, by its name. `cases`: how many it has; `changed`: when its settings were."""

    name: str
    at: Path
    cases: int
    changed: str


@dataclass(slots=True)
class SweepFolders:
    """The sweeps of one folder: itself, or the folders in it. Cases that were read are kept until a file of theirs
    changes.

    turn   held by who reads
    dated  whether files have the times at which they were written: copies in an exported page have not
    """

    folder: Path
    dated: bool = True
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _kept: dict[Path, tuple[Key, SweepRow]] = field(default_factory=dict[Path, tuple[Key, SweepRow]])

    def sweeps(self) -> list[FoundSweep]:
        """The sweeps, the newest first. Raises OSError if the folder cannot be read."""
        if _is_sweep(self.folder):
            return [self._found(self.folder)]
        found = [at for at in self.folder.iterdir() if not at.is_symlink() and at.is_dir() and _is_sweep(at)]
        return [self._found(at) for at in sorted(found, key=lambda at: (-self.dated * _changed(at), at.name))[:_MOST]]

    def read(self, found: FoundSweep) -> tuple[Sweep, list[str]]:
        """A sweep, and what could not be read of it: a case that is damaged, or a link, costs itself alone. Raises
        PenteractError where its settings are damaged."""
        folder = SweepFolder(found.at)
        settings, rows, notes = folder.settings(), list[SweepRow](), list[str]()
        linked = (found.at / CASES).is_symlink()
        for name in settings.cases:
            try:
                if linked:
                    raise OSError("its folder is a link, which is not followed")
                rows.append(self._row(folder, name))
            except (OSError, PenteractError) as error:
                what = error.what if isinstance(error, PenteractError) else error
                notes.append(f"{name}: {what}")
        return Sweep(settings=settings, rows=tuple(rows)), notes

    def _row(self, folder: SweepFolder, name: str) -> SweepRow:
        case = folder.case(name)
        if case.path.is_symlink():
            raise OSError("a link, which is not followed")
        key = tuple(_key(case.path / file) for file in _FILES)
        if (kept := self._kept.get(case.path)) is None or kept[0] != key:
            kept = self._kept[case.path] = key, case.row()
        return kept[1]

    def _found(self, at: Path) -> FoundSweep:
        try:
            settings: object = json.loads(read_regular(at / SETTINGS, largest=_LARGEST))
            cases = cast("dict[str, Any]", settings).get("cases") if isinstance(settings, dict) else None
        except (OSError, ValueError, RecursionError):
            cases = None
        count = len(cast("list[object]", cases)) if isinstance(cases, list) else 0
        changed = f"{datetime.fromtimestamp(_changed(at), UTC):%Y-%m-%d %H:%M} UTC" if self.dated else ""
        return FoundSweep(at.name, at, count, changed)


def copied_files(sweeps: SweepFolders) -> Iterator[tuple[str, bytes]]:
    """(path below the folder, content) of what is read of all sweeps, for a page that is exported with them. Raises
    OSError and PenteractError for what is damaged."""
    for found in sweeps.sweeps():
        folder = SweepFolder(found.at)
        settings = folder.settings()
        yield f"{found.name}/{SETTINGS}", read_regular(found.at / SETTINGS, largest=_LARGEST)
        rows, _ = sweeps.read(found)
        for row in rows.rows:
            at = folder.case(row.case.name).path
            for file in _FILES:
                if (at / file).is_file():
                    yield f"{found.name}/{CASES}/{at.name}/{file}", read_regular(at / file, largest=_LARGEST)
        if len(rows.rows) < len(settings.cases):
            raise OSError("a case of it is damaged")


def _key(path: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced. Raises OSError for a link."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0, 0, 0
    if path.is_symlink():
        raise OSError(f"{path.name} is a link, which is not followed")
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_sweep(at: Path) -> bool:
    return (at / SETTINGS).is_file() and not (at / SETTINGS).is_symlink()


def _changed(at: Path) -> float:
    try:
        return (at / SETTINGS).lstat().st_mtime
    except OSError:
        return 0.0
