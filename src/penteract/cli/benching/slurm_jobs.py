"""`penteract bench --slurm`: what jobs of a sweep need, and their batch files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from penteract.cli.resolve.gpu_defaults import Again, card_of, settle_defaults
from penteract.config.files.read import read_overrides
from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import Resolved
from penteract.errors import BadInput
from penteract.measure.bench.cases.sweep_cases import Expanded, ReadyCase
from penteract.measure.bench.cases.sweep_question import SweepQuestion
from penteract.measure.bench.slurm_launcher import SlurmLauncher, of_run
from penteract.measure.bench.sweep_loop import job_of
from penteract.measure.bench.sweep_run import cases_of
from penteract.measure.schemas.sweep_folder import SweepFolder

_SECTION = "slurm."
_DEVICE = "precision.device"
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


def cases_of_jobs(asked: SweepQuestion, words: Sequence[str]) -> Expanded:
    """The cases of a question as the nodes of `gpus` run them, with these keys of `[slurm]`: what nobody decided is
    chosen as `penteract train` does there. Raises BadInput."""
    given = {name.removeprefix(_SECTION): setting.value for name, setting in read_overrides(words).items()}
    node = cluster(asked.gpus).gpu if asked.gpus else None
    if asked.plan is not None and not asked.plan.packages and given.get("container", "none") != "none":
        asked = replace(asked, plan=replace(asked.plan, packages="none"))  # of a container it is not known

    def settle(run: Resolved, anew: Again) -> Resolved:
        if node is None or run.run.precision.device == "cpu":
            return run
        container = given.get("container", run.run.slurm.container) != "none"
        job = replace(run.run.slurm, **given)  # which has the fewest nodes, unless it names their number
        together = job.ranks_per_node if job.nodes in ("auto", 1) else 1
        card, device = card_of(node, container=container, host_ranks=together), list[str]()
        if card is not None and run.is_open(_DEVICE):
            device = [f"{_DEVICE}=cuda"]  # a node without its GPU says so, and computes nothing on its cores
            run = anew(device)
        return settle_defaults(run, card, lambda more: anew([*device, *more]))[0]

    return for_slurm(cases_of(asked, settle, here=False), words)


def left_open(asked: SweepQuestion, cases: Expanded) -> str:
    """A line that names what `penteract train` would choose for a node's GPU and these jobs do not, as nothing tells
    which GPU that is. "" where the sweep decides or names `gpus`, or runs on CPUs."""
    if asked.gpus or asked.plan is not None:
        return ""
    runs = [one.run for one in cases.cases if one.run.run.precision.device != "cpu"]
    names = [key for key in _OF_A_CARD if any(run.is_open(key) for run in runs)]
    if not names:
        return ""
    kept = f"{', '.join(names)} keep their defaults"
    return f"note: no GPU is asked from here, and the sweep names none: {kept} · fix: --gpus, such as 8xH100"


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
