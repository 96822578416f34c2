"""Where tests write: in memory, where there is room. A save syncs each of its files, and tests of faults save some
thousand times: on a disk that others use too, they would wait for it longer than for anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MEMORY, DISK = Path("/dev/shm"), Path("/var/tmp")
ROOM = 2 * 2**30  # bytes: a whole run leaves a tenth of that
ROOT = "PYTEST_DEBUG_TEMPROOT"  # where pytest makes the folders of tests


def use_memory() -> None:
    """Of this process and of the shards that it starts, unless another place is chosen."""
    if not {ROOT, "TMPDIR"} & set(os.environ) and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ[ROOT] = str(MEMORY)


def elsewhere(path: Path) -> Path | None:
    """A folder of another file system than that of `path`; None where there is none."""
    own = path.stat().st_dev
    return next((at for at in (MEMORY, DISK) if at.is_dir() and at.stat().st_dev != own), None)
