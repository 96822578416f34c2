"""A run's folder: the truth about a run, as files."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from pathlib import Path

from penteract.errors import DiskFailure


def create(out: str | Path, name: str) -> Path:
    """Make `out`/DATE_NAME_HASH for a new run and point `out`/latest at it.

    Raises DiskFailure when it cannot.
    """
    salt = hashlib.sha256(f"{time.time_ns()} {os.getpid()}".encode()).hexdigest()[:6]
    safe = "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
    folder = Path(out) / f"{time.strftime('%Y-%m-%d')}_{safe}_{salt}"
    try:
        (folder / "logs").mkdir(parents=True)
        (folder / "command.txt").write_text(shlex.join(sys.argv) + "\n")
        _point(Path(out) / "latest", folder)
    except OSError as e:
        raise DiskFailure("DISK", f"a run's folder cannot be made: {e.strerror}", where=str(folder),
                          fix="free space, or another --output.folder") from e  # fmt: skip
    return folder


def _point(link: Path, folder: Path) -> None:
    """Move the link in one step: a reader finds the old run or the new one."""
    new = link.with_name(f".latest-{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    new.replace(link)
