"""Whether the kernels of a run have been compiled on this host: what its ranks and the process that compiles them
ahead know of each other. Imports no torch.

Both find the same files, by a key of all that decides which kernels a run has:

    KEY.lock   locked as long as the process lives that compiles, whatever ends it
    KEY.json   what it compiled, and into which folders: it need not be done again while they are there
    KEY.toml   the run, as its ranks have it; KEY.rows: what was compiled so far; KEY.log: what was printed
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penteract.config.rules.kernel_limits import installed_version
from penteract.engine.device.own_folder import own_folder

WAIT_S = 40.0  # for which ranks wait; then they compile by themselves
_POLL_S = 0.05
_PACKAGES = ("torch", "triton", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
_CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME", "TMPDIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
# Sections of a run that decide no kernel.
_NO_KERNEL = ("output.", "slurm.", "checkpoint.", "limits.", "training.", "learning_rate.", "tokenizer.", "data.source",
              "data.revision", "data.validation_fraction", "data.allow_change", "model.name", "model.initial_std",
              "optimizer.learning_rate", "optimizer.weight_decay")  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """The files of one run's kernels, by their path without a suffix."""

    base: Path

    @staticmethod
    def of(values: Mapping[str, str], capability: tuple[int, int]) -> CompiledAhead | None:
        """`values`: of the run, by key; `capability`: of the GPUs here. None where no folder is this user's own."""
        if (mine := own_folder()) is None:
            return None
        about = [f"{key}={value}" for key, value in sorted(values.items()) if not key.startswith(_NO_KERNEL)]
        about += [str(capability), platform.python_version(), *map(installed_version, _PACKAGES)]
        about += [_given(name, mine) for name in _CACHES]
        try:
            key = hashlib.sha256("\n".join([*about, *_sources()]).encode()).hexdigest()[:32]
        except OSError:  # a file went as they were listed
            return None
        folder = mine / "compiled"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        return CompiledAhead(folder / key)

    @property
    def found(self) -> list[dict[str, Any]] | None:
        """What was compiled: of each kernel its `name`, `seconds`, `folder`, and `error`, "" if it was; None if it has
        to be compiled."""
        try:
            rows = json.loads(self._at("json").read_text())
            return rows if all(Path(row["folder"]).is_dir() for row in rows) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def run(self) -> Path:
        """The file of the run."""
        return self._at("toml")

    @property
    def log(self) -> Path:
        """What the process prints."""
        return self._at("log")

    def note(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Say what was compiled."""
        there = self._at(f"{os.getpid()}.json")
        there.write_text(json.dumps(list(rows)))
        there.replace(self._at("json"))

    def hold(self) -> int | None:
        """The open file of the lock, for the process that compiles; None if that is done already, or another process
        is at it."""
        if self.found is not None:
            return None
        file = None
        try:
            file = os.open(self._at("lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if file is not None:
                os.close(file)
            return None
        return file

    def wait(self, limit: float = WAIT_S) -> list[dict[str, Any]] | None:
        """What was compiled, once no process is at it; None if it has to be done, or is not done in `limit` seconds."""
        if self.found is None:
            self._wait(limit)
        return self.found

    def _wait(self, limit: float) -> None:
        began = time.monotonic()
        try:
            file = os.open(self._at("lock"), os.O_RDONLY)
        except OSError:
            return
        try:
            while time.monotonic() - began < limit:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except OSError:
                    time.sleep(_POLL_S)
        finally:
            os.close(file)

    def _at(self, suffix: str) -> Path:
        return self.base.with_suffix(f".{suffix}")


def _given(name: str, mine: Path) -> str:
    """What the user's environment says. A rank adds folders of its own choice, below `mine`, as it imports packages."""
    value = os.environ.get(name, "")
    return "" if value.startswith(str(mine)) else value


def _sources() -> list[str]:
    """The files of this package, each with its size and when it was written."""
    found = sorted((str(path), path.stat()) for path in Path(__file__).parents[2].rglob("*.py"))
    return [sys.executable, *(f"{name} {at.st_size} {at.st_mtime_ns}" for name, at in found)]
