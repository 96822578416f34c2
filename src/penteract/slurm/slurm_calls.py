"""Slurm's own commands, called with a limit of time: a controller that is away must not hang who asks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from penteract.errors import BadInput, PeerLost

CALL_S = 60.0  # Slurm's commands try for long; a busy controller takes seconds


def call(*words: str, given: str = "") -> str:
    """What a command prints. Raises BadInput where it is missing or refuses; PeerLost where nothing answers."""
    if shutil.which(words[0]) is None:
        raise BadInput("SLURM", f"there is no {words[0]} here", fix="submit from a node of the cluster")
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise PeerLost("SLURM", f"{words[0]} does not answer", found=type(e).__name__, fix="see `scontrol ping`") from e
    if done.returncode:
        fix = "set what it asks for, as --slurm.partition NAME; `penteract init` writes all keys of [slurm]"
        raise BadInput("SLURM", f"{words[0]} refuses", found=" ".join(done.stderr.split())[-300:], fix=fix)
    return done.stdout


def submit(batch: str, *options: str) -> str:
    """Submit a batch file; returns the job's number. Raises BadInput, PeerLost."""
    return call("sbatch", "--parsable", *options, given=batch).strip().partition(";")[0]


def cancel(jobs: Sequence[str]) -> None:
    """End jobs. Those that have ended are no error. Raises BadInput, PeerLost."""
    if jobs:
        call("scancel", "--quiet", *jobs)
