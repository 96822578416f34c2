"""`penteract bench --slurm`: what jobs of a sweep need, and their batch files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from penteract.config.files.read import read_overrides
from penteract.errors import BadInput
from penteract.measure.bench.cases.sweep_cases import Expanded, ReadyCase
from penteract.measure.bench.slurm_launcher import SlurmLauncher, of_run
from penteract.measure.bench.sweep_loop import job_of
from penteract.measure.schemas.sweep_folder import SweepFolder

_SECTION = "slurm."
_OF_A_CARD = ("precision.dtype", "kernels.attention", "kernels.elementwise")  # chosen where a run starts on GPUs


def slurm_words(words: Sequence[str], usd: float | None, *, slurm: bool) -> tuple[list[str], list[str]]:
    """(keys of `[slurm]`, the other overrides). They decide no result: a sweep with others is the same sweep.
    Raises BadInput for them without --slurm: cases would run here."""
    own = [word for word in words if word.removeprefix("--").startswith(_SECTION)]
    price = [f"slurm.usd_per_gpu_hour={usd}"] if usd is not None else []
    if not slurm and (alone := [*own, *price]):
        raise BadInput("USAGE", "only jobs of Slurm need that", found=alone[0], fix="--slurm, or leave it out")
    return [*own, *price], [word for word in words if word not in own]


def for_slurm(cases: Expanded, words: Sequence[str]) -> Expanded:
    """The cases with these keys of `[slurm]`. Raises BadInput."""
    given = {name.removeprefix(_SECTION): setting.value for name, setting in read_overrides(words).items()}
    changed = list[ReadyCase]()
    for one in cases.cases:
        run = replace(one.run.run, slurm=replace(one.run.run.slurm, **given))
        changed.append(replace(one, run=replace(one.run, run=run)))
    return Expanded(tuple(changed), cases.refused)


def left_open(cases: Expanded) -> str:
    """A line that names what `penteract train` would choose for a node's GPU and these jobs do not: cases are written
    here, where that GPU is not seen. "" where the sweep decides, or runs on CPUs."""
    runs = [one.run for one in cases.cases if one.run.run.precision.device != "cpu"]
    names = [key for key in _OF_A_CARD if any(run.origins.get(key, "default") == "default" for run in runs)]
    kept = f"{', '.join(names)} keep their defaults unless the sweep sets them"
    return f"note: no GPU is asked from here: {kept}" if names else ""


def slurm_launcher(folder: SweepFolder) -> SlurmLauncher:
    """For jobs of a sweep, from this working folder."""
    return SlurmLauncher(folder=folder.path.resolve(), working=Path.cwd())


def batches(folder: SweepFolder, cases: Expanded) -> Iterator[str]:
    """The batch files of a sweep that is not made yet, each with its cost. Raises BadInput."""
    runs = {one.case.name: one.run.run for one in cases.cases if one.case.predicted.fits is not False}
    launcher = replace(slurm_launcher(folder), slurm_of=lambda job: of_run(runs[job.name]))
    jobs = [job_of(folder, one.case, 1) for one in cases.cases if one.case.name in runs]
    for _, batch, cost in launcher.batches(jobs):
        yield f"{batch}\n# {cost}"
