"""What starts the cases of a sweep: this machine (`local.py`), or a cluster's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseJob:
    """An attempt at a case, to be started.

    name     of the case
    folder   of the attempt, which exists: what the job prints goes here, as `launcher.log`
    ranks    processes to start
    command  of each rank
    limit_s  seconds after which the sweep stops it; a scheduler may be told a longer limit
    """

    name: str
    folder: Path
    ranks: int
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What a launcher knows about a job.

    state      waiting in a queue, running, ended, or unknown: the launcher has no memory of it
    exit_code  once it has ended, if the launcher knows it. One of `errors.py`, such as 71, counts as it says
    cause      what ended the job, where the launcher knows better than an exit code: memory (a limit of memory killed
               it), time (a scheduler's limit), lost (its node failed, or a scheduler took it away)
    seconds    for which it has run, if known; else the sweep's own clock counts
    about      a phrase for people, such as a scheduler's words: NODE_FAIL on gpu-17
    """

    state: Literal["waiting", "running", "ended", "unknown"]
    exit_code: int | None = None
    cause: Literal["", "memory", "time", "lost"] = ""
    seconds: float | None = None
    about: str = ""


class Launcher(Protocol):
    """Starts jobs, tells how they are, and stops them. The sweep's loop (`sweep_loop.py`) does everything else.

    A launcher does not read or write `status.json`: the first rank of a job writes running, done, and failures that it
    can tell itself; the sweep asks `states` and writes the rest, once the job has ended. So a job that outlives the
    sweep's process is found again by its handle.
    """

    @property
    def name(self) -> str:
        """Of `CaseStatus.launcher`: local, slurm."""
        ...

    @property
    def at_once(self) -> int:
        """How many jobs may be under way; 0: any number, because a scheduler queues them."""
        ...

    @property
    def outlives(self) -> bool:
        """Whether jobs go on when this process ends. If not, they are lost with it."""
        ...

    def start(self, jobs: Sequence[CaseJob]) -> list[str]:
        """Start jobs; returns a handle for each: a text by which another process finds the job again.

        `ranks` fresh processes run `command`, with the variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE,
        LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. They may span nodes. If one fails, the others are ended. Raises
        BadInput where a job can never start: the sweep then ends.
        """
        ...

    def states(self, handles: Sequence[str]) -> list[JobState | None]:
        """The state of each job, without waiting for it; a scheduler is asked one question for all. None: no answer,
        which is no news."""
        ...

    def stop(self, handles: Sequence[str]) -> None:
        """End jobs, waiting or running; returns without waiting for the end, which `states` tells. A job that has ended
        is no error."""
        ...
