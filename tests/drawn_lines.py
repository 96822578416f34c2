"""Draws that go on another time: their lines, kept in a file by what they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def digest(about: str, tests: Iterable[str]) -> str:
    """Of the sources of the package, of these files below `tests/`, and of what else draws depend on (`about`)."""
    of = hashlib.sha256(about.encode())
    for path in (*sorted((ROOT / "src").rglob("*.py")), *(ROOT / "tests" / name for name in tests)):
        of.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return of.hexdigest()[:16]


def kept_lines(progress: Path, sources: str) -> list[dict[str, Any]]:
    """The lines of draws that were made with these sources. One that was cut off in the middle is left out."""
    if not progress.exists():
        return []
    lines = [json.loads(line) for line in progress.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line.pop("sources") == sources]
