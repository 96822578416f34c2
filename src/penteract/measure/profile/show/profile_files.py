"""The files of a profile, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from penteract.errors import DiskFailure
from penteract.measure.profile.prediction import Prediction
from penteract.measure.profile.recording import Recording, path_of
from penteract.measure.profile.show.page import page
from penteract.measure.profile.show.trace_file import FILE as TRACE
from penteract.measure.profile.show.trace_file import write_trace_file
from penteract.measure.schemas.profile import FILE, ProfileFile

PAGE = "profile.html"


class Profiled(NamedTuple):
    """A profile, with what its trace and its picture show."""

    profile: ProfileFile
    predicted: Prediction
    recordings: list[Recording]


def write_files(folder: Path, found: Profiled) -> None:
    """Write `profile.json`, `profile.html` and the trace; the recordings of ranks are removed then. Raises
    DiskFailure."""
    try:
        _write(folder / FILE, json.dumps(found.profile, ensure_ascii=False) + "\n")
        _write(folder / PAGE, page(found.profile))
        write_trace_file(folder / f"{TRACE}.tmp", found.predicted, found.recordings)
        (folder / f"{TRACE}.tmp").replace(folder / TRACE)
        for recording in found.recordings:
            path_of(folder, recording.rank).unlink()
    except OSError as error:
        raise DiskFailure.of(error, folder) from None


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
