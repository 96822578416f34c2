"""The command, date and commit of a record."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hexadecimal(text: str) -> str:
    """The value of `--commit`, for scripts that run without a git repository: a hash, or empty."""
    if text.strip("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"found {text} / allowed a commit's hash")
    return text


def provenance(command: str, commit: str = "") -> dict[str, str]:
    """The command, the date, and the commit of the package, with `-dirty` if its sources have uncommitted changes.
    `commit`: the hash, if there is no git repository."""
    changed = "-dirty" if _git("status", "--porcelain", "--", "src") else ""
    return {
        "command": command,
        "commit": commit or _git("rev-parse", "--short", "HEAD") + changed,
        "date": time.strftime("%Y-%m-%d"),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
