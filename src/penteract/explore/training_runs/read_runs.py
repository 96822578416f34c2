"""Run folders: which there are, and what their files say. All of it may be written meanwhile, or by strangers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from penteract.config.files.regular import read_regular
from penteract.config.files.run_folder import (
    CHECKPOINTS,
    COMMAND,
    ERROR_FIELDS,
    ERRORS,
    METRICS,
    PROVEN,
    RUN,
    STATUS,
    STEP,
    Row,
    commands,
    metrics_row,
    without_repeated,
)

_SMALL, _LARGE = 2**22, 2**28  # bytes of a file, at most
_STEPS = 2**53  # a step that no run has
_MOST = 500  # folders that are listed, the newest


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder with a run. `at` is no link, and neither is any file that is read."""

    at: Path

    @property
    def name(self) -> str:
        """Its name."""
        return self.at.name

    def status(self) -> dict[str, Any]:
        """What its status says; empty if nothing."""
        try:
            found: object = json.loads(self.read(STATUS))
        except (OSError, ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def commands(self) -> list[str]:
        """The command that started it, and those that resumed it; none if they are not known."""
        try:
            return commands(self.read(COMMAND).decode("utf-8", "replace").strip())
        except OSError:
            return []

    def errors(self) -> list[dict[str, Any]]:
        """The rows of its errors, the first first."""
        try:
            lines = self.read(ERRORS).splitlines()
        except OSError:
            return []
        found = list[dict[str, Any]]()
        for line in lines:
            try:
                row: object = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and cast("dict[str, Any]", row).keys() >= ERROR_FIELDS:
                found.append(cast("dict[str, Any]", row))
        return found

    def checkpoints(self) -> Iterator[tuple[int, Path, bool]]:
        """(step, folder, whether it is proven) of each committed checkpoint, the newest step first."""
        folder, found = self.at / CHECKPOINTS, list[tuple[int, Path, bool]]()
        if not folder.is_symlink() and folder.is_dir():
            for path in folder.iterdir():
                if (step := re.fullmatch(STEP, path.name)) and path.is_dir() and not path.is_symlink():
                    found.append((int(step[1]), path, (path / PROVEN).exists()))
        yield from sorted(found, reverse=True)

    def read(self, name: str, largest: int = _SMALL) -> bytes:
        """The content of one of its files. Raises OSError for a link, and for what is no regular file."""
        path = self.at / name
        if path.is_symlink():
            raise OSError(f"{name} is a link")
        return read_regular(path, largest=largest)


@dataclass(slots=True)
class RunFolders:
    """The runs of one folder: itself, or the folders in it. Metrics that were read are kept until their file changes.

    turn  held by who reads
    """

    folder: Path
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _kept: dict[str, tuple[tuple[int, int, int], list[Row]]] = field(
        default_factory=dict[str, tuple[tuple[int, int, int], list[Row]]]
    )

    def folders(self) -> list[RunFolder]:
        """The runs, the newest first. Raises OSError if the folder cannot be read."""
        if _is_run(self.folder):
            return [RunFolder(self.folder)]
        found = [path for path in self.folder.iterdir() if not path.is_symlink() and path.is_dir() and _is_run(path)]
        return [RunFolder(at) for at in sorted(found, key=lambda at: (-_changed(at), at.name))[:_MOST]]

    def metrics(self, run: RunFolder) -> list[Row]:
        """The rows of a run's metrics, without those that were trained again; an incomplete last line is left out.
        Raises OSError."""
        found = (run.at / METRICS).lstat()
        key = found.st_ino, found.st_size, found.st_mtime_ns
        if (kept := self._kept.get(run.name)) is None or kept[0] != key:
            lines = run.read(METRICS, _LARGE).split(b"\n")[:-1]
            rows = [row for step, row in map(metrics_row, lines) if row is not None and step < _STEPS]
            kept = self._kept[run.name] = key, without_repeated(rows)
        return kept[1]


def _is_run(at: Path) -> bool:
    return any((at / name).is_file() and not (at / name).is_symlink() for name in (STATUS, RUN, METRICS))


def _changed(at: Path) -> float:
    """When its status or its metrics were last written."""
    times = [0.0]
    for name in (STATUS, METRICS, RUN):
        try:
            times.append((at / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def moment(seconds: float) -> str:
    """A time of a file, to read."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
