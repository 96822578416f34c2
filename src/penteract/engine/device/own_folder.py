"""A folder of this user's on this host, for what need not be made again: compiled kernels, and tokens of a
stream."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def own_folder() -> Path | None:
    """Make it; None where others can write into it, since what lies there is run."""
    try:
        folder = Path(tempfile.gettempdir()) / f"penteract-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    safe = not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if safe else None
