"""Where FlashAttention-4 keeps the kernels that it has compiled: on this host, so that the next run need not compile
them again, which takes seconds. By default it forgets them."""

from __future__ import annotations

import os

from penteract.engine.device.own_folder import own_folder

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"  # the package's


def keep_compiled(capability: tuple[int, int]) -> None:
    """Let the package keep compiled kernels for GPUs of this compute capability in a folder of this user's; call it
    before the package is imported. What the environment says stands. A folder that others can write is not used: the
    package runs what lies in it."""
    if ENABLED in os.environ or FOLDER in os.environ:
        return
    major, minor = capability
    if (mine := own_folder()) is not None:
        os.environ[ENABLED] = "1"
        os.environ[FOLDER] = str(mine / f"flash_attention_{major}{minor}")
