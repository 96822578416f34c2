"""Start a training run: launch its ranks on this host, or train as a rank that torchrun started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import NamedTuple

from penteract.config.files.run_folder import typed
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import RETRAIN, go_on, retrain_from, to_toml, with_first_origins
from penteract.config.run import RunPrediction, RunSpec
from penteract.engine.device import host_memory
from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.hf.folder import remember
from penteract.engine.run_folder import checkpoint_folder, lease, rundir
from penteract.engine.runtime.generation import Generation
from penteract.engine.runtime.launch import launch
from penteract.engine.runtime.prepared import WORKER, PreparedRanks
from penteract.errors import BadInput
from penteract.units import GIB, show_bytes

_OF_A_GPU = 2 * GIB  # of the host's memory, for each rank: CUDA and the libraries. An allowance, not measured


def train(  # noqa: PLR0913 (options of the command line)
    resolved: Resolved,
    *,
    launched: bool = False,
    predicted: Callable[[], RunPrediction] = RunPrediction,
    compare: Path | None = None,
    resume: Path | None = None,
    init: Path | None = None,
    into: Path | None = None,
    grace: float = 30.0,
    json: bool = False,
    debug: bool = False,
    explain: Callable[[str], str] = lambda line: line,
    prepared: PreparedRanks | None = None,
) -> int:
    """Train; returns the exit code. `predicted()`: memory, time and FLOPs; called once ranks can start.
    `grace`: seconds that a scheduler gives the run to stop. `into`: the folder of a new run.

    `explain`: what is printed where a rank had no memory left.

    `prepared`: ranks of this host that wait for what they are to do.

    `launched`: this process is a rank that a launcher started. Otherwise it starts all ranks of the layout as child
    processes, even if there is one, because OpenMP settings must be in the environment before torch is loaded.
    """
    generation = Generation.of(os.environ, resolved.run.out) if launched else None
    if generation is not None and (error := generation.ended()) is not None:
        raise error
    if not launched:
        _check_ranks(resolved)
    prediction = predicted()
    words = [f"--predicted={dumps(asdict(prediction))}", f"--grace={grace}", *["--json"] * json, *["--debug"] * debug]
    paths = (("compare", compare), ("resume", resume), ("init", init))
    words += [f"--{name}={path}" for name, path in paths if path is not None]
    if resume is not None:
        words.append(f"--command={typed(sys.argv, compare=compare)}")
    if launched:
        worker = import_module("penteract.engine.runtime.worker")
        return worker.joined(lambda: _lease_run(resolved, resume, init, into, compare), resolved.run, words, generation)
    resolved = _with_room(resolved, prediction, quiet=json)
    folder, run_lease, _ = _lease_run(resolved, resume, init, into, compare)
    command = ["-m", WORKER, str(folder), f"--epoch={run_lease.epoch}", *words]
    try:
        return launch(resolved.run.layout.world, command, folder, os.environ, explain, prepared=prepared)
    finally:
        rundir.cancel_resume(folder)
        checkpoint_folder.release(folder)
        run_lease.end()


def _check_ranks(resolved: Resolved) -> None:
    """Raise BadInput for far more ranks than this host has cores."""
    world, most = resolved.run.layout.world, max(64, 4 * usable_here())
    if world > most:
        raise BadInput("RANKS", "more ranks than this host should start", found=world, allowed=f"<= {most}",
                       fix="start them with torchrun on more hosts, or lower the degrees")  # fmt: skip


def _with_room(resolved: Resolved, predicted: RunPrediction, *, quiet: bool) -> Resolved:
    """The run, which waits for its saves if nobody decided that and this host has no room for copies of what they save;
    a line says so, unless `quiet`. Raises BadInput if the ranks will need more of its memory than is free: on CPUs all
    that they allocate, and for saves in the background a copy of what they save."""
    world, free = resolved.run.layout.world, host_memory.available()
    gpus, copied = _gpus(resolved), predicted.snapshot_bytes
    allocated = 0 if gpus else predicted.allocated_bytes
    if free is None:
        return resolved
    if allocated * world > free:
        cpus = "" if resolved.run.precision.device == "cpu" else "; CPUs train it, as no GPU is here"
        raise BadInput("MEMORY", f"{world} {'rank' if world == 1 else 'ranks'} of {show_bytes(allocated)} do not "
                       f"fit this host's free memory{cpus}",
                       found=show_bytes(allocated * world), allowed=show_bytes(free),
                       fix="a smaller model or micro-batch; penteract plan shows what a layout takes")  # fmt: skip
    if not copied or (copied + (_OF_A_GPU if gpus else allocated)) * world <= free:
        return resolved
    if resolved.is_open("checkpoint.asynchronous"):
        why = f"copies of {show_bytes(copied * world)} do not fit this host's free memory, {show_bytes(free)}"
        if not quiet:
            print(f"Each save is waited for: {why}", flush=True)
        waits = replace(resolved.run, checkpoint=replace(resolved.run.checkpoint, asynchronous=False))
        origins = dict(resolved.origins) | {"checkpoint.asynchronous": f"derived: {why}"}
        return replace(resolved, run=waits, origins=origins)
    raise BadInput("MEMORY", f"{world} ranks and copies of what they save do not fit this host's free memory",
                   found=f"{show_bytes(allocated * world)} and {show_bytes(copied * world)}",
                   allowed=show_bytes(free), fix="--checkpoint.asynchronous false")  # fmt: skip


def _gpus(resolved: Resolved) -> bool:
    """Whether ranks will use GPUs, as far as is visible without loading torch."""
    device = resolved.run.precision.device
    return device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())


class LeasedRun(NamedTuple):
    """A run's folder, the lease of it, and the run as its file keeps it."""

    folder: Path
    lease: lease.Lease
    run: RunSpec


def _lease_run(
    resolved: Resolved, resume: Path | None, init: Path | None, into: Path | None, compare: Path | None
) -> LeasedRun:
    """Make a run's folder, or take the one that is resumed. If another process takes it over, this one stops as if by
    SIGTERM.

    A resumed run keeps its run.toml until its checkpoint is read, so a refused resume changes nothing. Nor is anything
    made where the data are wrong. What depends on this moment is settled: where checkpoints are, the dataset's commit.
    """
    data = import_module("penteract.engine.data")
    run, at = resolved.run, None
    run = replace(run, checkpoint=replace(run.checkpoint, folder=checkpoint_folder.absolute(run.checkpoint.folder)))
    if resume is not None:
        lease.refuse_held(resume, notify=_notify)
        at = checkpoint_folder.of_resumed(resume, run.checkpoint.folder)
        import_module("penteract.engine.session.resume").check_resume(resume, run, at)
    elif into is not None and into.exists():
        rundir.refuse_foreign(into)
        lease.refuse_held(into, notify=_notify)
    if resume is None and not (into is not None and checkpoint_folder.leads_to(into, run.checkpoint.folder)):
        checkpoint_folder.refuse_used_folder(run.checkpoint.folder, run.out)
    data.check_data(run.data, run.tokenizer, run.sequence_length, run.model.vocab_size)
    run = replace(run, data=replace(run.data, revision=data.pin(run.data.source, run.data.revision, _notify)))
    command = typed(sys.argv, init=init, compare=compare)
    folder = resume or rundir.create(run.out, run.model.name, command, run.checkpoint.folder, into)
    run_lease = lease.take(folder, notify=_notify)
    if at is not None:
        checkpoint_folder.settle(folder, at)
    run_lease.ousted = lambda: os.kill(os.getpid(), signal.SIGTERM)
    origins = dict(resolved.origins)
    if run.data.revision != (asked := resolved.run.data.revision):
        origins["data.revision"] = f"derived: the {'newest commit' if asked == 'auto' else f'commit of {asked}'} then"
    settled = replace(resolved, run=run, origins=origins)
    if resume is not None:
        text = to_toml(with_first_origins(settled, folder / rundir.RUN), go_on(str(folder)))
        (folder / rundir.NEXT).write_text(text)
    else:
        (folder / rundir.RUN).write_text(to_toml(settled, retrain_from(str(init)) if init else RETRAIN))
    if init is not None:
        remember(folder, init)
    return LeasedRun(folder, run_lease.begin(), run)


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
