"""The batch file of many short jobs of one shape: an array, each with its own command, folder and log.

Each writes its exit code and its seconds when it ends, so that Slurm need not remember them. Slurm does not queue them
again: whoever started them decides, because another attempt has another folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penteract.config.run import Slurm
from penteract.slurm.batch_file import Step, header, python_of, srun, surroundings, text
from penteract.slurm.job_shape import JobShape
from penteract.units import Seconds

LOG, EXIT = "launcher.log", "launcher.exit"  # in the folder of a job
_OTHERS_S = 30  # from one rank's end to the others'


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayTask:
    """One job of an array: what each rank runs, and the folder, absolute, for its log and its exit code."""

    command: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayJob:
    """Tasks of one shape.

    name       for people
    limit      seconds of each task
    output     folder for what Slurm itself says, absolute
    working    folder in which ranks run, absolute
    here       the interpreter of this process: a container has another
    """

    name: str
    shape: JobShape
    limit: Seconds
    tasks: Sequence[ArrayTask]
    output: Path
    working: Path
    here: str

    def text(self, slurm: Slurm) -> str:
        """The batch file. Raises BadInput."""
        at_once = Step(shape=self.shape, command=(), working=self.working)
        return text([
            *header(slurm, self.shape, name=self.name, output=self.output / "%A_%a.log", working=self.working,
                    limit=self.limit),
            f"#SBATCH --no-requeue --array=0-{len(self.tasks) - 1}",
            *surroundings(slurm, at_once),
            'case "$SLURM_ARRAY_TASK_ID" in',
            *(line for number, task in enumerate(self.tasks) for line in self._case(slurm, number, task)),
            "esac",
            'code=$?',
            'echo "$code $SECONDS" > "$exit.next" && mv "$exit.next" "$exit"',
            'exit "$code"',
        ])  # fmt: skip

    def _case(self, slurm: Slurm, number: int, task: ArrayTask) -> list[str]:
        own = python_of(slurm, self.here) if task.command[:1] == (self.here,) else list(task.command[:1])
        step = Step(shape=self.shape, command=(*own, *task.command[1:]), working=self.working, reached=(task.folder,))
        return [
            f"{number})",
            f"exit={shlex.quote(str(task.folder / EXIT))}",
            f"exec >> {shlex.quote(str(task.folder / LOG))} 2>&1",
            srun(slurm, step, _OTHERS_S),
            ";;",
        ]
