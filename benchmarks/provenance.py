"""What a record of predictions was made with."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hexadecimal(text: str) -> str:
    """`--commit` of scripts that run where git does not tell it: a hash, or nothing."""
    if text.strip("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"found {text} / allowed a commit's hash")
    return text


def provenance(command: str, commit: str = "") -> dict[str, str]:
    """The command, the date, and the commit of the package: `-dirty` where its sources were changed since. `commit`:
    where git does not tell it."""
    changed = "-dirty" if _git("status", "--porcelain", "--", "src") else ""
    return {
        "command": command,
        "commit": commit or _git("rev-parse", "--short", "HEAD") + changed,
        "date": time.strftime("%Y-%m-%d"),
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
