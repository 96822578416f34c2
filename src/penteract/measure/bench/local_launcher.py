"""Cases on this machine, one after the other, each in fresh processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penteract.engine.device.children import bound_to_parent
from penteract.measure.bench.launcher import CaseJob, JobState

_FORGET_S = 10.0  # for processes that were killed to be gone
_LOOK_S = 0.02


@dataclass(slots=True)
class LocalLauncher:
    """A `Launcher` of child processes. One job at a time: a second would share its memory, clocks and links.

    Jobs end with this process, however it ends.
    """

    name: str = "local"
    at_once: int = 1
    outlives: bool = False
    _jobs: dict[str, tuple[subprocess.Popen[bytes], float]] = field(
        default_factory=dict[str, tuple["subprocess.Popen[bytes]", float]]
    )
    _seconds: dict[str, float] = field(default_factory=dict[str, float])  # of those that have ended

    def start(self, jobs: Sequence[CaseJob]) -> list[str]:
        """Start jobs; handles are process ids."""
        return [self._start(job) for job in jobs]

    def _start(self, job: CaseJob) -> str:
        words = [sys.executable, "-m", "penteract.measure.bench.local_ranks", str(job.folder), str(job.ranks)]
        with (job.folder / "launcher.log").open("ab") as log:
            process = subprocess.Popen(
                [*words, *job.command[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                preexec_fn=bound_to_parent(),
            )  # fmt: skip
        self._jobs[str(process.pid)] = process, time.monotonic()
        return str(process.pid)

    def states(self, handles: Sequence[str]) -> list[JobState | None]:
        """Of each job. One of another process is unknown: it has ended with that."""
        return [self._state(handle) for handle in handles]

    def _state(self, handle: str) -> JobState:
        if handle not in self._jobs:
            return JobState(state="unknown")
        process, begun = self._jobs[handle]
        code = process.poll()
        if code is None:
            return JobState(state="running", seconds=time.monotonic() - begun)
        seconds = self._seconds.setdefault(handle, time.monotonic() - begun)
        return JobState(state="ended", exit_code=code if code >= 0 else 128 - code, seconds=seconds)

    def stop(self, handles: Sequence[str]) -> None:
        """Kill jobs; their ranks end with them, and have given their memory back when this returns."""
        for handle in handles:
            if handle in self._jobs:
                process, _ = self._jobs[handle]
                ranks, until = _children(process.pid), time.monotonic() + _FORGET_S
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_FORGET_S)
                while any(map(_runs, ranks)) and time.monotonic() < until:
                    time.sleep(_LOOK_S)


def _children(pid: int) -> list[int]:
    """The processes that a process has started and that run; empty where the system does not tell."""
    with suppress(OSError):
        return [
            int(child) for at in Path(f"/proc/{pid}/task").iterdir() for child in (at / "children").read_text().split()
        ]
    return []


def _runs(pid: int) -> bool:
    """Whether a process has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
