"""`penteract bench`: run many layouts, one after the other, and rank them beside what the plan said."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penteract.cli.benching.running import run_folder
from penteract.cli.benching.slurm_jobs import batches, cases_of_jobs, left_open, slurm_words
from penteract.cli.benching.sweep_options import OUT, SweepOptions, question_of
from penteract.cli.benching.sweep_tables import packages_line, planned, show, unfinished
from penteract.cli.benching.sweep_verbs import compare_sweeps, show_results, status
from penteract.cli.resolve.gpu_defaults import Again, card_here, settle_defaults
from penteract.config.resolve.resolved_run import Resolved
from penteract.errors import BadInput
from penteract.measure.bench.cases.sweep_cases import Expanded
from penteract.measure.bench.cases.sweep_file import FILE
from penteract.measure.bench.cases.sweep_question import SweepQuestion
from penteract.measure.bench.sweep_run import again, cases_of, held, make, other_sweep, renewed, settings_of
from penteract.measure.schemas.sweep import Sweep, SweepSettings
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.planner.token_counts import parse_length

EXAMPLES = (
    "penteract bench sweep.toml --dry-run",
    "penteract bench tiny --grid parallel.tp=1/2 --grid memory.recompute=none/full --ranks 2 batch.global_batch_size=8",
    "penteract bench llama-3.2-1b --gpus 4xH200 --batch 16seqs --top 20 --budget 60",
    "penteract bench sweep.toml --slurm --dry-run slurm.partition=gpu slurm.ranks_per_node=8",
    "penteract bench sweeps/sweep",
    "penteract bench status sweeps/sweep",
    "penteract bench show sweeps/sweep --csv sweep.csv --plot sweep.svg",
    "penteract bench compare sweeps/before sweeps/after",
)

bench = App(
    name="bench",
    help="Run many layouts in fresh processes, and rank them beside what was predicted.",
    help_format="markdown",
    result_action="return_value",
)


@bench.default
def run(  # noqa: PLR0913 (the options of a verb are its parameters)
    target: Annotated[
        str, Parameter(help="A sweep's file, a sweep's folder to continue, a run file, a preset, or a published model.")
    ],
    /,
    *,
    grid: Annotated[
        tuple[str, ...], Parameter(help="A key of a run file and its values: parallel.tp=1/2/4. May be repeated.")
    ] = (),
    top: Annotated[
        int | None, Parameter(help="Run this many layouts, the fastest of `penteract plan` with these options.")
    ] = None,
    gpus: Annotated[
        str | None,
        Parameter(help="Such as 8xH200, or a file of `calibrate`: predict the time of a step, and what fits."),
    ] = None,
    ranks: Annotated[
        int | None, Parameter(help="Ranks of each case; dp follows. By default the number of --gpus.")
    ] = None,
    seq: Annotated[str | None, Parameter(help="With --top: tokens a sequence, as 8192 or 8Ki.")] = None,
    batch: Annotated[
        str | None, Parameter(help="With --top: global batch size in tokens (1Mi) or sequences (128seqs).")
    ] = None,
    fix: Annotated[str | None, Parameter(help="With --top: only layouts with these settings, such as tp=2/4.")] = None,
    precision: Annotated[str | None, Parameter(help="With --top: a recipe, or several: bf16,bf16_pure.")] = None,
    optimizer: Annotated[str | None, Parameter(help="With --top: adamw or muon.")] = None,
    packages: Annotated[str | None, Parameter(help="With --top: as in plan; by default those installed here.")] = None,
    headroom: Annotated[
        float | None, Parameter(help="Fraction of a GPU's memory that is kept free of tensors.")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Timed steps of a case; by default 10.")] = None,
    warmup: Annotated[int | None, Parameter(help="Steps of a case before the timed ones; by default 3.")] = None,
    limit: Annotated[float | None, Parameter(help="Seconds after which a case is stopped; by default 600.")] = None,
    budget: Annotated[
        float | None,
        Parameter(help="GPU-minutes (on CPUs process-minutes) of all cases: none starts beyond it."),
    ] = None,
    data: Annotated[
        str | None,
        Parameter(help="What cases train on: random tokens, or run, the run file's data. By default random."),
    ] = None,
    out: Annotated[Path | None, Parameter(help="The sweep's folder; by default sweeps/NAME.")] = None,
    slurm: Annotated[
        bool, Parameter(negative="", help="Run each case as a Slurm job, with the settings of [slurm] in its run file.")
    ] = False,
    usd_per_gpu_hour: Annotated[float | None, Parameter(help="Short for --slurm.usd_per_gpu_hour: US dollars.")] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print the cases and their cost, with --slurm the batch files, and exit.")
    ] = False,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object at the end.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:
    """Run a sweep: each case for some steps, in fresh processes. Run it again, and it goes on with what is not done.

    A case predicted not to fit is skipped. One that fails, hangs or runs out of memory stops no other.

    Exit codes: 0 each case has ended; 75 some have not, because the budget is spent or it was stopped.
    """
    settings = {"gpus": gpus, "ranks": ranks, "steps": steps, "warmup": warmup, "limit": limit, "budget": budget,
                "headroom": headroom, "data": data}  # fmt: skip
    plan = {"seq": seq and parse_length(seq), "batch": batch, "fix": fix, "precision": precision,
            "optimizer": optimizer, "packages": packages}  # fmt: skip
    of_jobs, words = slurm_words(overrides, usd_per_gpu_hour, slurm=slurm)
    options = SweepOptions(grid=grid, top=top, plan=plan, settings=settings, words=words)
    folder = SweepFolder(Path(target))
    if folder.exists:
        left = _go_on(folder, replace(options, words=[*words, *of_jobs]), dry_run=dry_run, slurm=slurm, out=out)
        if dry_run:
            show(*unfinished(left))
            return 0
    else:
        asked = question_of(target, options)
        folder = SweepFolder(out or Path(OUT) / asked.name)
        if dry_run:
            _print_cases(folder, asked, of_jobs, slurm=slurm)
            return 0
        if folder.exists:
            _same_launcher(folder, slurm=slurm)
            again(folder, asked)
        else:
            cases = _cases(asked, of_jobs, slurm=slurm)
            make(folder, _settings(asked, cases, slurm=slurm), cases)
            _note(*(f"not a case: {name}: {why}" for name, why in cases.refused), *packages_line(cases))
    return run_folder(folder, json=json)


def _cases(asked: SweepQuestion, of_jobs: Sequence[str], *, slurm: bool) -> Expanded:
    """The cases of a question; a line names what is left open of jobs."""
    cases = cases_of_jobs(asked, of_jobs) if slurm else cases_of(asked, _settle)
    _note(left_open(asked, cases) if slurm else "")
    return cases


def _settings(asked: SweepQuestion, cases: Expanded, *, slurm: bool) -> SweepSettings:
    command = shlex.join(["penteract", *sys.argv[1:]])
    return settings_of(asked, cases, command, "slurm" if slurm else "local")


def _print_cases(folder: SweepFolder, asked: SweepQuestion, of_jobs: Sequence[str], *, slurm: bool) -> None:
    """What the same command would run, with its cost: of a sweep that has begun, what is left of it."""
    begun = folder.exists and (there := folder.settings()).asked == asked.digest
    if begun and slurm == (there.launcher == "slurm"):
        sweep = renewed(folder, asked)
        show(*unfinished(sweep))
        names = {row.case.name for row in sweep.rows if not row.status.over}
        cases = _cases(asked, of_jobs, slurm=slurm) if slurm and names else Expanded((), ())
        cases = cases._replace(cases=tuple(one for one in cases.cases if one.case.name in names))
    else:
        cases = _cases(asked, of_jobs, slurm=slurm)
        show(*planned(cases, _settings(asked, cases, slurm=slurm)))
    if slurm:
        print(*batches(folder, cases), sep="\n\n")
    _note(other_sweep(folder, asked))


def _note(*lines: str) -> None:
    print("".join(f"{line}\n" for line in lines if line), end="", file=sys.stderr)


def _same_launcher(folder: SweepFolder, *, slurm: bool) -> None:
    """Refuse to go on with jobs of Slurm here, or the other way round."""
    if slurm != (folder.settings().launcher == "slurm"):
        raise BadInput("USAGE", "a sweep goes on where it began", where=str(folder.path),
                       found="--slurm" if slurm else "no --slurm", fix="another --out")  # fmt: skip


def _go_on(folder: SweepFolder, options: SweepOptions, *, dry_run: bool, slurm: bool, out: Path | None) -> Sweep:
    """A sweep that exists, with a new budget, which is written but for a dry run. Refuses what it has already."""
    given = [
        name for name, value in {**options.plan, **options.settings, "top": options.top}.items() if value is not None
    ]
    other = [
        *(name for name in given if name != "budget"),
        *["grid"] * bool(options.grid),
        *["out"] * (out is not None),
        *options.words,
    ]
    if other:
        raise BadInput("USAGE", "a sweep that exists goes on as it is", found=other[0],
                       allowed="--budget", fix=f"penteract bench status {folder.path}")  # fmt: skip
    settings = folder.settings()
    if "budget" in given:
        budget = FILE.check({"budget": options.settings["budget"]}, "", lambda name: f"--{name}")["budget"]
        settings = replace(settings, budget_gpu_minutes=budget)
        if not dry_run:
            with held(folder):
                folder.write_settings(settings)
    if slurm:
        _same_launcher(folder, slurm=slurm)
    return replace(folder.read(), settings=settings)


def _settle(run: Resolved, anew: Again) -> Resolved:
    """What nobody decided, as `penteract train` chooses it for the GPU that is here."""
    return settle_defaults(run, card_here(run.run.precision.device), anew)[0]


bench.command(status)
bench.command(show_results, name="show")
bench.command(compare_sweeps, name="compare")
