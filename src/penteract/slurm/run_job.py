"""The job of one training run: it goes on by itself after a preemption, its time limit or a lost peer.

A batch script that ends in the time that Slurm gives it counts as completed, or as failed, and is not queued again. So
the script asks for that itself, by what the run has left; and it ends with the run's code, for clusters that have
RequeueExit=75.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penteract.config.run import Slurm
from penteract.slurm.batch_file import Step, header, python_of, srun, surroundings, text, waiting
from penteract.slurm.job_shape import JobShape

FOLDER, BATCH, SUBMITTED = "slurm", "job.sh", "submitted.toml"  # in a run's folder
_SAVE_S = 600  # from one rank's end to the others': they may be saving

# The run's own word: status.json, unless it is as before this start; else the last row of errors.jsonl; else srun.
_VERDICT = """\
of_file() { tail -n 1 "$1" 2>/dev/null | grep -o '"exit_code": [0-9]*' | tail -n 1 | grep -o '[0-9]*$'; }
said="$(of_file "$run/status.json")"
if [ "$(cat "$run/status.json" 2>/dev/null)" != "$status" ] && [ -n "$said" ]; then code=$said
elif [ "$(wc -c 2>/dev/null < "$run/errors.jsonl")" != "$errors" ]; then
  said="$(of_file "$run/errors.jsonl")"; code=${said:-$code}
elif [ "$code" = 138 ] || [ "$code" = 140 ] || { [ "$code" -gt 128 ] && [ "$stopped" = yes ]; }; then code=75
fi"""  # 138, 140: SIGUSR1, SIGUSR2 before a rank could answer it

# A lost peer is tried again while there are new checkpoints, and `retries` times without one.
_REQUEUE = """\
saved="$(head -n 1 "$run/checkpoints/latest" 2>/dev/null)"
read -r tries before 2>/dev/null < "$run/slurm/retries" || { tries=0; before=; }
[ "$saved" = "$before" ] || tries=0
again=no
if [ "$code" = 75 ]; then again=yes
elif [ "$code" = 72 ] && [ "$tries" -lt RETRIES ]; then again=yes; tries=$(( tries + 1 ))
fi
echo "$tries $saved" > "$run/slurm/retries"
echo "job $SLURM_JOB_ID ended with $code, queued again: $again" >&2
if [ "$again" = yes ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code\""""


def run_job(slurm: Slurm, shape: JobShape, words: Sequence[str], run: Path, working: Path, here: str) -> str:
    """The batch file of a run.

    words   of `penteract train`, without those that name the run's folder
    run     its folder, absolute; working: that in which paths of the run file count
    here    the interpreter of this process
    Raises BadInput.
    """
    command = [*python_of(slurm, here), "-m", "penteract", "train", *words, f"--into={run}", f"--grace={slurm.grace}"]
    step = Step(shape=shape, command=tuple(command), working=working, reached=(run,))
    return text([
        *header(slurm, shape, name=run.name, output=run / FOLDER / "%j.log", working=working),
        f"#SBATCH --requeue --signal=USR1@{slurm.grace}",
        "# A run of penteract. It may be submitted again: it goes on from its last checkpoint.",
        f"run={shlex.quote(str(run))}",
        *surroundings(slurm, step),
        'status="$(cat "$run/status.json" 2>/dev/null)" errors="$(wc -c 2>/dev/null < "$run/errors.jsonl")"',
        *waiting(srun(slurm, step, _SAVE_S)),
        _VERDICT,
        _REQUEUE.replace("RETRIES", str(slurm.retries)),
    ])  # fmt: skip


def as_cpus(slurm: Slurm) -> Slurm:
    """The same for ranks on CPUs: no GPUs are asked for."""
    return replace(slurm, gpus="none")
