"""Where FlashAttention-4 keeps the kernels that it has compiled: on this host, so that the next run need not compile
them again, which takes seconds. By default it forgets them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"  # the package's


def keep_compiled(capability: tuple[int, int]) -> None:
    """Let the package keep compiled kernels for GPUs of this compute capability in a folder of this user's; call it
    before the package is imported. What the environment says stands. A folder that others can write is not used: the
    package runs what lies in it."""
    if ENABLED in os.environ or FOLDER in os.environ:
        return
    major, minor = capability
    mine = Path(tempfile.gettempdir()) / f"penteract-{os.getuid()}"
    if _private(mine):
        os.environ[ENABLED] = "1"
        os.environ[FOLDER] = str(mine / f"flash_attention_{major}{minor}")


def _private(folder: Path) -> bool:
    """Make a folder; whether nobody else can write into it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022
