"""What a record of predictions was made with."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def provenance(command: str) -> dict[str, str]:
    """The command, the date, and the commit of the package: `-dirty` where its sources were changed since."""
    changed = "-dirty" if _git("status", "--porcelain", "--", "src") else ""
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") + changed,
        "date": time.strftime("%Y-%m-%d"),
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
