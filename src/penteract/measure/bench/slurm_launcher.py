"""Cases of a sweep as jobs of Slurm: an array for each number of ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec, Slurm
from penteract.errors import BadInput, DiskFailure, PeerLost, PenteractError
from penteract.measure.bench.launcher import CaseJob, JobState
from penteract.slurm.answers import RUNNING, WAITING, Answer, ask
from penteract.slurm.array_job import EXIT, LOG, ArrayJob, ArrayTask
from penteract.slurm.job_shape import JobShape, cost_line, job_shape
from penteract.slurm.run_job import as_cpus
from penteract.slurm.slurm_calls import cancel, submit

ASK_S = 5.0  # between two questions to Slurm: all users share its controller
SPARE_S = 60.0  # a scheduler's limit is later than the sweep's, which tells more
Cause = Literal["", "memory", "time", "lost"]
_CAUSES: Mapping[str, Cause] = {
    "OUT_OF_MEMORY": "memory", "TIMEOUT": "time", "DEADLINE": "time", "NODE_FAIL": "lost", "BOOT_FAIL": "lost",
    "PREEMPTED": "lost", "REVOKED": "lost", "CANCELLED": "lost",
}  # fmt: skip
# What slurmstepd and srun write into a log. Without a memory cgroup, Slurm's own word is no more than 0:9.
_SIGNS: Sequence[tuple[str, Cause]] = (
    ("oom-kill event", "memory"), ("oom_kill event", "memory"), ("Out Of Memory", "memory"),
    ("exceeded memory limit", "memory"), ("exceeded job memory limit", "memory"),
    ("DUE TO TIME LIMIT", "time"), ("DUE TO NODE FAILURE", "lost"), ("DUE TO PREEMPTION", "lost"),
)  # fmt: skip


def of_run_file(job: CaseJob) -> Slurm:
    """`[slurm]` of a case's run file."""
    return of_run(resolve(job.folder.parent / "run.toml", "").run)


def of_run(run: RunSpec) -> Slurm:
    """What a run's job needs."""
    return as_cpus(run.slurm) if run.precision.device == "cpu" else run.slurm


@dataclass(kw_only=True, slots=True)
class SlurmLauncher:
    """A `Launcher`. `slurm_of`: what a job needs. `folder`: of the sweep, absolute; batch files, and which job has
    which attempt, are in FOLDER/slurm. A handle is `ARRAY_INDEX`.

    A job leaves its exit code in its attempt's folder; Slurm is asked about jobs that have left none.
    """

    folder: Path
    working: Path
    slurm_of: Callable[[CaseJob], Slurm] = of_run_file
    here: str = sys.executable
    name: str = "slurm"
    at_once: int = 0
    outlives: bool = True
    ask_s: float = ASK_S
    _said: dict[str, Answer] = field(default_factory=dict[str, Answer])
    _asked: dict[str, float] = field(default_factory=dict[str, float])  # by handle, this process's clock

    def batches(self, jobs: Sequence[CaseJob]) -> Iterator[tuple[ArrayJob, str, str]]:
        """(array, its batch file, its cost for people) for each shape, limit and need. Raises BadInput."""
        alike = dict[tuple[Slurm, JobShape, float], list[CaseJob]]()
        for job in jobs:
            slurm = self.slurm_of(job)
            alike.setdefault((slurm, job_shape(job.ranks, slurm), job.limit_s), []).append(job)
        for (slurm, shape, limit), group in alike.items():
            array = ArrayJob(
                name=self.folder.name, shape=shape, limit=limit + SPARE_S, output=self._own, working=self.working,
                tasks=[ArrayTask(command=job.command, folder=job.folder.resolve()) for job in group], here=self.here,
            )  # fmt: skip
            yield array, array.text(slurm), cost_line(shape, slurm, limit + SPARE_S, len(group))

    def start(self, jobs: Sequence[CaseJob]) -> list[str]:
        """See `Launcher`. Where one array cannot be submitted, those before it end: nobody would know of them. Raises
        BadInput, PeerLost, DiskFailure."""
        handles, numbers = dict[Path, str](), list[str]()
        try:
            for array, batch, _ in list(self.batches(jobs)):  # all are checked before the first is submitted
                numbers.append(number := self._submit(array, batch))
                handles |= {task.folder: f"{number}_{index}" for index, task in enumerate(array.tasks)}
        except PenteractError:
            self.stop(numbers)
            raise
        return [handles[job.folder.resolve()] for job in jobs]

    def _submit(self, array: ArrayJob, batch: str) -> str:
        """Submit an array, and write which attempts it has; returns its number."""
        number = ""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            number = submit(batch)
            (self._own / f"{number}.sh").write_text(batch, encoding="utf-8")
            (self._own / f"{number}.json").write_text(json.dumps([str(task.folder) for task in array.tasks]))
        except OSError as e:
            self.stop([number] if number else [])
            raise DiskFailure("DISK", "could not write a batch file", where=str(e.filename), found=e.strerror,
                              fix="free some space; the same command goes on") from e  # fmt: skip
        return number

    def states(self, handles: Sequence[str]) -> list[JobState | None]:
        """See `Launcher`."""
        left = {handle: self._left(handle) for handle in handles}
        silent = [handle for handle, state in left.items() if state is None]
        if not self._ask(silent):
            return [left[handle] for handle in handles]
        return [left[handle] or self._state(handle, self._said.get(handle)) for handle in handles]

    def stop(self, handles: Sequence[str]) -> None:
        """See `Launcher`."""
        with suppress(BadInput, PeerLost):
            cancel(handles)

    def _ask(self, handles: Sequence[str]) -> bool:
        """Ask Slurm about jobs, unless it was asked about them just now. -> whether there is an answer."""
        now = time.monotonic()
        if any(now - self._asked.get(handle, -self.ask_s) >= self.ask_s for handle in handles):
            try:
                self._said = ask(handles)
            except (PeerLost, BadInput):
                return False
            self._asked = dict.fromkeys(handles, now)
        return True

    @property
    def _own(self) -> Path:
        return self.folder / "slurm"

    def _attempt(self, handle: str) -> Path | None:
        """The folder of the attempt that a handle stands for."""
        number, _, index = handle.partition("_")
        with suppress(OSError, ValueError, IndexError, TypeError):
            return Path(json.loads((self._own / f"{number}.json").read_text())[int(index)])
        return None

    def _left(self, handle: str) -> JobState | None:
        """What an ended job has left; None: nothing yet."""
        at = self._attempt(handle)
        with suppress(OSError, ValueError):
            code, seconds = (at / EXIT).read_text().split() if at else ("", "")
            cause = self._sign(handle) if int(code) else ""
            return JobState(state="ended", exit_code=int(code), cause=cause, seconds=float(seconds))
        return None

    def _state(self, handle: str, said: Answer | None) -> JobState:
        """The state of a job that has left nothing, by what Slurm says of it."""
        if said is not None and said.state in WAITING | RUNNING:
            state = "waiting" if said.state in WAITING else "running"
            return JobState(state=state, seconds=said.seconds, about=said.about)
        sign = self._sign(handle)
        if said is None:
            return JobState(state="unknown", cause=sign)
        cause = sign or _CAUSES.get(said.state, "")
        return JobState(state="ended", exit_code=said.exit_code, cause=cause, seconds=said.seconds, about=said.about)

    def _sign(self, handle: str) -> Cause:
        """What the logs say that ended a job; "" where they say nothing. Memory comes first: it is why a step ends."""
        at, text = self._attempt(handle), ""
        for path in (at / LOG if at else None, self._own / f"{handle}.log"):
            with suppress(OSError):
                text += path.read_text(errors="replace")[-(2**16) :] if path else ""
        found: list[Cause] = [cause for sign, cause in _SIGNS if sign in text]
        return found[0] if found else ""
