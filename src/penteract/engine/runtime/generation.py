"""torchrun starts all ranks anew after any failure. A code that another try cannot change is left for its next ones.

The next ranks cannot know the run's folder: without `--resume` they would train a new run from its first step. So the
code lies in `OUT/.torchrun`, named after the torchrun that started these ranks. A job that a scheduler runs again has
another torchrun, though its TORCHELASTIC_RUN_ID may be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penteract.engine.run_folder.exclusive import create_exclusively
from penteract.errors import BadInput, BadNumerics, CorruptData, DiskFailure, PenteractError, Preempted

FOLDER = ".torchrun"
_FINAL = {kind.exit_code: kind for kind in (BadInput, CorruptData, BadNumerics, DiskFailure, Preempted)}
_KEPT_S = 30 * 24 * 3600.0  # older ones are removed


@dataclass(frozen=True, slots=True)
class Generation:
    """The ranks that one torchrun has started on this host, once or several times. `out`: the folder of runs."""

    out: Path
    run_id: str
    agent: str  # digest of what only this torchrun on this host has

    @staticmethod
    def of(environment: Mapping[str, str], out: str | Path) -> Generation | None:
        """None where torchrun did not start this process."""
        if (run_id := environment.get("TORCHELASTIC_RUN_ID")) is None:
            return None
        # torchrun makes a folder of its own for errors: …/RUN_ID_x4k1/attempt_0/0/error.json
        errors = Path(environment.get("TORCHELASTIC_ERROR_FILE", ""))
        own = str(errors.parents[2]) if len(errors.parents) > 3 else _process(os.getppid())
        whole = [run_id, own, socket.gethostname(), _boot()]
        return Generation(Path(out), run_id, hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16])

    @property
    def path(self) -> Path:
        """The file of the final code."""
        return self.out / FOLDER / f"{self.agent}.json"

    def leave(self, code: int, run: Path) -> None:
        """Leave `code` if it is final, unless there is one. Never raises OSError: then the next ranks try again."""
        if code not in _FINAL or not self.out.is_dir():
            return
        row = {"run_id": self.run_id, "exit_code": code, "run_dir": str(run)}
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                create_exclusively(self.path, json.dumps(row) + "\n")
            for old in self.path.parent.iterdir():
                if old.stat().st_mtime < time.time() - _KEPT_S:
                    old.unlink()

    def ended(self) -> PenteractError | None:
        """The error to end with if earlier ranks of the same torchrun left a final code."""
        try:
            row = json.loads(self.path.read_text())
            kind, run = _FINAL[row["exit_code"]], str(row["run_dir"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        fix = "torchrun --max-restarts 0 tries once"
        if kind is Preempted:
            fix = f"start a new torchrun with --resume {run}"
        return kind("ENDED", f"the run ended with {kind.exit_code} before torchrun started it again", where=run,
                    found=f"run id {self.run_id}", fix=fix)  # fmt: skip


def _process(pid: int) -> str:
    """A process, and when it started: its number is used again."""
    with suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[19]}"
    return str(pid)


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
