"""The text of batch files. Ranks are tasks of one `srun`, so each gets Slurm's signals itself, and its exit code is
known: torchrun would end with 1 whatever happened, and kill ranks thirty seconds after a signal.

Values come from run files and command lines: what stands in an `#SBATCH` line is checked, all else is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penteract.config.run import Slurm
from penteract.errors import BadInput
from penteract.slurm.job_shape import JobShape, seconds_of
from penteract.units import Seconds

SETTLE_S = 60  # after one rank has ended, for the others: they end by themselves
_AUTO, _NONE = "auto", "none"
_NAME = re.compile(r"[A-Za-z0-9_.,@:+-]+")
_OPTION = re.compile(r"--[a-z][\w-]*(?:[= ].*)?")
_TERMS = ("partition", "account", "qos")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One `srun` of a job: as many tasks as ranks, each `command` in the `working` folder. `reached`: folders that a
    container must see."""

    shape: JobShape
    command: tuple[str, ...]
    working: Path
    reached: tuple[Path, ...] = ()


def check(slurm: Slurm) -> None:
    """Raise BadInput for values that cannot stand in a batch file."""
    for name in (*_TERMS, "gpu_type", "memory"):
        _name(name, getattr(slurm, name))
    seconds_of(slurm.time)
    for option in () if slurm.options == _NONE else slurm.options:
        if not _OPTION.fullmatch(option):
            raise BadInput("VALUE", "not an option of sbatch", where="slurm.options", found=option[:60],
                           allowed="--name=value", fix='slurm.options=["--constraint=ib"]')  # fmt: skip


def header(
    slurm: Slurm, shape: JobShape, *, name: str, output: Path, working: Path, limit: Seconds | None = None
) -> list[str]:
    """The `#SBATCH` lines that every job has. `limit`: seconds; None: `slurm.time`. Raises BadInput."""
    check(slurm)
    options = {
        "job-name": shlex.quote(name),
        "nodes": shape.nodes,
        "ntasks": shape.ranks,
        "ntasks-per-node": shape.on_a_node,
    }
    options |= {term: getattr(slurm, term) for term in _TERMS if getattr(slurm, term) != _AUTO}
    time = slurm.time if limit is None else _minutes(limit)
    options |= {"time": time} if time != _AUTO else {}
    options |= {"mem": slurm.memory} if slurm.memory != _AUTO else {}
    options |= {"cpus-per-task": slurm.cpus_per_rank} if slurm.cpus_per_rank else {}
    each = f"{slurm.gpu_type}:{shape.on_a_node}" if slurm.gpu_type != _AUTO else str(shape.on_a_node)
    if slurm.gpus != "none":
        options |= {"gpus-per-node": each} if slurm.gpus == "gpus_per_node" else {"gres": f"gpu:{each}"}
    options |= {"output": _path(output), "open-mode": "append", "chdir": _path(working)}
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items()]
    lines += ["#SBATCH --exclusive"] * slurm.exclusive
    return lines + [f"#SBATCH {option}" for option in (() if slurm.options == _NONE else slurm.options)]


def surroundings(slurm: Slurm, step: Step) -> list[str]:
    """What ranks find in their environment: the store's address, a key of this start alone, their numbers.

    The key is made on the node: no file, no argument and no record of Slurm has it.
    """
    threads = f"${{OMP_NUM_THREADS:-$(( n = ${{SLURM_CPUS_ON_NODE:-1}} / {step.shape.on_a_node}, n > 0 ? n : 1 ))}}"
    return [
        *(() if slurm.setup == _NONE else slurm.setup),
        "port=$(( 10000 + SLURM_JOB_ID % 20000 ))",
        'while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$(( port + 1 )); done',
        'export MASTER_ADDR="$(hostname)" MASTER_PORT="$port"',
        "unset SLURM_HOSTFILE  # its order of nodes would count, whatever --distribution says",
        f"export WORLD_SIZE={step.shape.ranks} LOCAL_WORLD_SIZE={step.shape.on_a_node}",
        f'export OMP_NUM_THREADS="{threads}"',
        "export PENTERACT_RUN_KEY=\"$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')\"",
    ]


def srun(slurm: Slurm, step: Step, settle: int = SETTLE_S) -> str:
    """The `srun` of a step, with `RANK` and `LOCAL_RANK` from the task's place. Ranks of a node have consecutive
    numbers, whatever the site's or the user's SLURM_DISTRIBUTION: layouts put neighbours on one host. They choose their
    cores themselves. `settle`: seconds from the first rank's end to the others'."""
    shape = step.shape
    words = ["srun", f"--nodes={shape.nodes}", f"--ntasks={shape.ranks}", f"--ntasks-per-node={shape.on_a_node}"]
    words += [f"--cpus-per-task={slurm.cpus_per_rank}"] * bool(slurm.cpus_per_rank)
    words += ["--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={settle}"]
    inner, mounts = list(step.command), [f"{at}:{at}" for at in (step.working, *step.reached)]
    mounts += () if slurm.container_mounts == _NONE else slurm.container_mounts
    if slurm.container != _NONE and slurm.container_runtime == "pyxis":
        words += [f"--container-image={slurm.container}", f"--container-mounts={','.join(mounts)}"]
        words += [f"--container-workdir={step.working}"]
    elif slurm.container != _NONE:
        gpus = ["--nv"] * (slurm.gpus != "none")
        inner = ["apptainer", "exec", *gpus, "--bind", ",".join(mounts), "--pwd", str(step.working),
                 slurm.container, *inner]  # fmt: skip
    place = 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"; exec "$@"'
    return shlex.join([*words, "bash", "-c", place, "rank", *inner])


def python_of(slurm: Slurm, here: str) -> list[str]:
    """The words that start Python in a job. `here`: the interpreter of this process."""
    if slurm.python != _AUTO:
        return shlex.split(slurm.python)
    return [here] if slurm.container == _NONE else ["python3"]


def waiting(step: str) -> Iterator[str]:
    """Lines that run `step` and leave its exit code in `$code`. The script outlives the signals that ranks answer:
    whoever only waited would be ended by them."""
    yield "trap 'stopped=yes' TERM USR1 USR2"
    yield "set -m  # srun in a process group of its own: a signal to this script's group would make it kill the ranks"
    yield f"{step} &"
    yield "step=$! stopped=no; set +m"
    yield 'until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done'
    yield 'wait "$step"; code=$?  # of the step, where a signal ended the wait before it'


def text(lines: Sequence[str]) -> str:
    """The file."""
    return "\n".join(["#!/bin/bash", *lines, ""])


def _name(key: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise BadInput("VALUE", "not a name that Slurm knows", where=f"slurm.{key}", found=value[:60],
                       allowed="letters, digits and _ . , @ : + -", fix="check the name")  # fmt: skip


def _path(path: Path) -> str:
    """A path in an `#SBATCH` line."""
    text = str(path)
    if not text.isprintable():
        raise BadInput("VALUE", "this path cannot stand in a batch file", found=repr(text)[:120], fix="rename it")
    return shlex.quote(text)


def _minutes(limit: Seconds) -> str:
    """Seconds as hours:minutes:seconds; Slurm rounds up to minutes."""
    whole = int(-(-limit // 1))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
