"""The files of a report: it replaces what it wrote itself, and nothing else."""

from __future__ import annotations

from pathlib import Path

from penteract.errors import BadInput
from penteract.measure.report.accuracy_page import PAGE_BEGINS, PLOT_TITLES

_MARKS = {".md": (PAGE_BEGINS,), ".svg": tuple(PLOT_TITLES.values())}


def refuse_foreign(path: Path) -> None:
    """Raise BadInput for an existing page or plot that no report wrote."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):  # no text, or not to be read: not a report's
        text = ""
    if not any(mark in text for mark in _MARKS[path.suffix]):
        raise BadInput("FILE", "it exists already, and no report wrote it", where="--out", found=path,
                       fix="choose another name, or remove it")  # fmt: skip
