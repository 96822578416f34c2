"""Profile a run: start its ranks, or be one that a launcher started; lay what they measured over the prediction."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Literal

from penteract.config.hardware import Cluster, cluster
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.launch import launch
from penteract.errors import BadInput, DiskFailure, PenteractError
from penteract.measure.calibrate.hardware_file import catalogued
from penteract.measure.profile.analyse.analysis import analyse, read_recordings
from penteract.measure.profile.out_of_memory import out_of_memory_line
from penteract.measure.profile.prediction import predict
from penteract.measure.profile.record.short_calibration import FILE as SHORT
from penteract.measure.profile.recording import Recording
from penteract.measure.profile.show.profile_files import Profiled
from penteract.measure.schemas.profile import Basis

_AGAIN = "the same command measures again"
_RANK = "penteract.measure.profile.record.profiled_rank"


def measure(resolved: Resolved, folder: Path, init: Path | None, *, calibrate: bool, debug: bool, quiet: bool) -> int:
    """Start all ranks of a run, and wait for their recordings; returns the exit code of the first that failed."""
    words = ["-m", _RANK, str(folder), *[f"--init={init}"] * (init is not None)]
    words += [*["--calibrate"] * calibrate, *["--debug"] * debug, *["--quiet"] * quiet]
    run = resolved.run
    return launch(run.layout.world, words, folder, os.environ, lambda line: out_of_memory_line(line, run), again=_AGAIN)


def joined(resolved: Resolved, folder: Path, init: Path | None, *, calibrate: bool, quiet: bool) -> Path:
    """Be a rank that a launcher such as torchrun started, and measure. Rank 0 makes the folder, which is returned."""
    worker = import_module(_RANK)
    return worker.joined(
        resolved.run, lambda: make_folder(resolved, folder), folder, init=init, calibrate=calibrate, quiet=quiet
    )


def make_folder(resolved: Resolved, folder: Path) -> None:
    """The folder of a profile, with the run file that its ranks read."""
    try:
        folder.mkdir(parents=True)
        (folder / rundir.RUN).write_text(to_toml(resolved))
    except FileExistsError:
        raise BadInput("FILE", "it exists already", where="--out", found=folder, fix="choose another name") from None
    except OSError as error:
        raise DiskFailure.of(error, folder) from None


def result(resolved: Resolved, folder: Path, file: str, gpus: str | None) -> Profiled:
    """The profile of recordings that lie in a folder. `gpus`: a hardware file, or a name as of `plan`; None: the
    catalogue's curves of the device, or those that a short calibration has left."""
    recordings = read_recordings(folder, resolved.run)
    cluster, basis = _basis(folder, recordings[0], gpus)
    try:
        predicted = predict(resolved.run, cluster)
    except PenteractError as error:
        error.what = f"measured, but not predicted: {error.what}"
        raise
    return Profiled(analyse(file, predicted, recordings, basis), predicted, recordings)


def _basis(folder: Path, recording: Recording, gpus: str | None) -> tuple[Cluster, Basis]:
    assert recording.ceilings is not None, "rank 0 measures them"
    kind: Literal["file", "catalogue", "short"] = "file" if gpus and gpus.endswith(".toml") else "catalogue"
    if gpus is None and (folder / SHORT).exists():
        gpus, kind = str(folder / SHORT), "short"
    found = cluster(gpus or catalogued(recording.made["device"]) or recording.made["device"])
    about = {
        "file": f"the hardware file {gpus}", "catalogue": f"curves of {found.name}",
        "short": "a short calibration right after the step; penteract calibrate measures more",
    }[kind]  # fmt: skip
    return found, {"kind": kind, "about": about, "ceilings": recording.ceilings}
