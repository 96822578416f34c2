"""`penteract train`: resolve the run, refuse what is invalid, and hand over to the engine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from penteract.cli.resolve.compared_run import compared_run
from penteract.cli.resolve.folders import find_run, has_checkpoint
from penteract.cli.resolve.slurm_run import SlurmRun
from penteract.cli.resolve.world import launched
from penteract.cli.torch_modules import torch_module
from penteract.config.files.keys import keys
from penteract.config.resolve.presets import PRESETS
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.config.rules.kernel_packages import packages_here, packages_needed
from penteract.config.rules.without_effect import notes_without_effect
from penteract.errors import BadInput

if TYPE_CHECKING:
    from penteract.cli.resolve.card_cluster import Card
    from penteract.config.layout import Layout
    from penteract.config.run import RunSpec

EXAMPLES = (
    "penteract train",
    "penteract train --parallel.dp 2 --parallel.tp 2 --compare latest",
    "penteract train --init path/to/hf-model --parallel.tp 2",
    "penteract train run.toml --steps 20 optimizer.learning_rate=1e-3",
    "torchrun --nproc-per-node 8 -m penteract train run.toml --parallel.tp 2",
    "penteract train run.toml --slurm --dry-run --slurm.time 24:00:00 --usd-per-gpu-hour 2.5",
)


def train(  # noqa: PLR0913 (the options of a verb are its parameters)
    run: Annotated[Path | None, Parameter(help="A run file; see `penteract init`.")] = None,
    /,
    *,
    preset: Annotated[
        str | None,
        Parameter(help=f"Start from {', '.join(PRESETS)}, or a published model, as llama-3.1-8b; files win.")] = None,
    steps: Annotated[int | None, Parameter(help="Short for --training.steps: the last step of the run.")] = None,
    compare: Annotated[
        str | None, Parameter(help="A run folder, or latest: compare losses and the first gradients.")] = None,
    resume: Annotated[str | None, Parameter(help="A run folder, or latest: continue from its last checkpoint.")] = None,
    init: Annotated[
        str | None, Parameter(help="Weights to start from: a Hugging Face folder, a run, its step, or latest.")] = None,
    into: Annotated[
        Path | None, Parameter(help="The run's folder, made if need be. A checkpoint in it is resumed.")] = None,
    slurm: Annotated[
        bool,
        Parameter(negative="", help="Submit a Slurm job, with the settings of [slurm].")] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="With --slurm: print the batch file and cost, submit nothing.")] = False,
    usd_per_gpu_hour: Annotated[float | None, Parameter(help="Short for --slurm.usd_per_gpu_hour: US dollars.")] = None,
    grace: Annotated[
        float,
        Parameter(help="Seconds from a scheduler's signal to its kill: warn if a step and save take longer.")] = 30.0,
    json: Annotated[
        bool, Parameter(negative="", help="Print one JSON object at the end; steps are in metrics.jsonl.")] = False,
    draw: Annotated[bool, Parameter(negative="", help="Draw the pipeline schedule and exit.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, Parameter(help="Short for --training.log_level.")] = None,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:  # fmt: skip
    """Train a model, on this machine or on the ranks that torchrun starts.

    Any value of a run file can be set here: `--section.key VALUE` or `section.key=VALUE`.
    """
    _check_options(grace, preset, resume=resume, init=init, into=into, only_printed=dry_run and not slurm)
    launch = launched(os.environ)
    words = given = _given(overrides, steps, log_level, usd_per_gpu_hour)
    resumed = find_run(resume, _out_folder(words), flag="--resume", needs="checkpoints/latest") if resume else None
    if resumed:
        _weights().check_resumable(resumed)
    if into is not None and has_checkpoint(into):
        resumed, run, preset, init = into, into / "run.toml", None, None
    if resumed and run is None:
        run = resumed / "run.toml"
    weights = _weights().find_weights(init, _out_folder(words), flag="--init") if init else None
    if weights:
        words = [*_weights().words_of(weights, run, preset, words), *words]
        preset = "" if run is None and preset is None else preset
    world, file, named = launch.world if launch else None, run, preset

    def again(more: list[str]) -> Resolved:
        return resolve(file, named, [*more, *words], world)

    resolved = again([])
    if slurm and resolved.run.slurm.nodes != "auto":
        world = resolved.run.slurm.nodes * resolved.run.slurm.ranks_per_node
        resolved = again([])
    with nullcontext() if launch or slurm or draw else _prepared(resolved) as prepared:
        _planner().check_op_names(resolved.run.layout)
        card = None
        if not slurm:
            resolved, card, chosen = _planner().settled(
                resolved, again, launched=launch is not None, resumed=resumed is not None, weights=weights
            )
            chosen += _notes(preset, run, given, resolved)
            if chosen and not json and (launch is None or launch.rank == 0):
                print(*chosen, sep="\n")
        compared = compared_run(compare, resolved, shown=not json and (launch is None or launch.rank == 0))
        _check_start(resolved, None if draw else card, slurm=slurm, here=not (slurm or draw or launch))
        if not slurm and (launch is None or launch.rank == 0):  # which alone shows metrics
            _check_trackers(resolved)
        if weights:
            _weights().check_weights(weights, resolved)
        if draw:
            print(_drawn(resolved.run.layout))
            return 0
        start = weights.path if weights else None
        if slurm:
            more = _words(preset=preset, compare=compared, init=start, json=json, debug=debug)
            job = SlurmRun(resolved=resolved, file=run, words=[*more, *given], folder=resumed or into)
            return job.go(dry_run=dry_run, as_json=json)
        with _compiling(resolved, card):
            return torch_module("engine.runtime.start", "training needs").train(
                resolved, launched=launch is not None, predicted=lambda: _planner().predict_run(resolved.run, card),
                compare=compared, resume=resumed, init=start, into=None if resumed else into, grace=grace,
                json=json, debug=debug, prepared=prepared,
                explain=lambda *about: _planner().out_of_memory_line(*about, run=resolved.run),
            )  # fmt: skip


def _prepared(resolved: Resolved) -> Any:
    """A context with the run's ranks, which import torch while the rest of this command is done; with None where they
    need not."""
    module = import_module("penteract.engine.runtime.prepared")
    run = resolved.run
    gpus = run.precision.device != "cpu"
    return module.PreparedRanks.of(run.layout.world, os.environ, gpus=gpus) or nullcontext()


def _drawn(lay: Layout) -> str:
    draw, width = import_module("penteract.schedule.draw").draw_generated, shutil.get_terminal_size().columns
    return draw(lay.schedule, lay.vpp, lay.placement, lay.gradient_accumulation_steps, width=width)


def _planner() -> Any:
    return import_module("penteract.cli.resolve.planned_run")


def _weights() -> Any:
    return import_module("penteract.cli.resolve.weights")


def _compiling(resolved: Resolved, card: Card | None) -> Any:
    """A context in which the kernels of the run are compiled for this host's GPUs, where they are not yet."""
    module = torch_module("engine.runtime.compiling", "training needs")
    return module.compiling(resolved, card and card.capability, os.environ)


def _check_options(
    grace: float, preset: str | None, *, resume: str | None, init: str | None, into: Path | None, only_printed: bool
) -> None:
    """Raise BadInput for options that contradict each other."""
    if not grace > 0:  # nan neither
        raise BadInput("USAGE", "a time to stop is positive", where="--grace", found=grace, allowed="> 0 seconds")
    if init and resume:
        raise BadInput("USAGE", "a resumed run has its own weights", found="--resume and --init", fix="leave one out")
    if preset is not None and resume:
        raise BadInput("USAGE", "a resumed run has its model", found="--resume and --preset", fix="leave one out")
    if into is not None and resume:
        raise BadInput("USAGE", "a resumed run has its folder", found="--into and --resume", fix="leave one out")
    if only_printed:
        raise BadInput("USAGE", "only a job can be printed", found="--dry-run", fix="--slurm --dry-run")


def _words(**options: Path | str | bool | None) -> list[str]:
    """Options as a command line has them; paths are absolute, because they were found from here."""
    named = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in options.items()}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items() if value]


def _given(overrides: Sequence[str], steps: int | None, log_level: str | None, usd: float | None) -> list[str]:
    """The values of the command line, those of short options too. Of two values the last counts: it may be a fix."""
    short = {"training.steps": ("--steps", steps), "training.log_level": ("--log-level", log_level),
             "slurm.usd_per_gpu_hour": ("--usd-per-gpu-hour", usd)}  # fmt: skip
    more = [f"{key}={keys()[key].check(value, flag)}" for key, (flag, value) in short.items() if value is not None]
    return [*overrides, *more]


def _notes(preset: str | None, file: Path | None, given: Sequence[str], resolved: Resolved) -> list[str]:
    """What a person may not expect of the words that were given."""
    keys_given = [word.removeprefix("--").partition("=")[0] for word in given]
    notes = [f"Preset {preset}, and the values of {file} over it"] * bool(file and preset)
    return notes + notes_without_effect(keys_given, resolved.run.model, resolved.run.layout)


def _out_folder(overrides: Sequence[str]) -> str:
    """The folder of runs. It is needed before the run file is read, because `--resume latest` finds the file there."""
    given = (word.removeprefix("--").partition("=") for word in reversed(overrides))
    return next((value for key, _, value in given if key == "output.folder"), keys()["output.folder"].default)


def _check_start(resolved: Resolved, card: Card | None, *, slurm: bool, here: bool) -> None:
    """Check before anything starts that the files of the run and the packages of its kernels are there; of a run whose
    ranks start `here`, its GPUs too: a launcher's ranks find their own. Raises BadInput."""
    _check_paths(resolved)
    _check_packages(resolved.run, card, slurm=slurm)
    if here:
        _planner().check_gpus(resolved, card)


def _check_paths(resolved: Resolved) -> None:
    """Check before anything starts that the files of the run exist. Raises BadInput."""
    run = resolved.run
    sources = (run.data.source,) if isinstance(run.data.source, str) else run.data.source
    files = [("data.source", s) for s in sources if s != "builtin" and not s.startswith("hf:")]
    if run.tokenizer != "bytes":
        files.append(("tokenizer.source", run.tokenizer))
    for key, name in files:
        try:
            exists = Path(name).exists()
        except (OSError, ValueError):
            exists = False
        if not exists:
            where = f"{key} ({resolved.origins[key]})"
            raise BadInput("FILE", "no such file or folder", where=where, found=name[:120], fix="check the path")


def _check_packages(run: RunSpec, card: Card | None, *, slurm: bool) -> None:
    """Check before anything starts on a GPU that the packages of the run's kernels are installed. Raises BadInput; for
    jobs of Slurm a note will do, as their nodes may have what this host lacks."""
    missing = " and ".join(sorted(packages_needed(run.model, run.layout) - packages_here()))
    if slurm and missing and run.slurm.container == "none":
        print(f"note: this run's kernels need {missing}, which this host lacks", file=sys.stderr)
    if missing and card is not None:
        raise BadInput("KERNEL", "packages of kernels are not installed", where="[kernels]",
                       found=f"a python without {missing}", allowed="the versions that penteract[gpu] names",
                       fix="pip install 'penteract[gpu]', or plan with --packages none")  # fmt: skip


def _check_trackers(resolved: Resolved) -> None:
    """Check before anything starts that the packages of the run's trackers are installed. Raises BadInput."""
    missing = [name for name in resolved.run.trackers if find_spec(name) is None]
    if missing:
        where = f"output.trackers ({resolved.origins['output.trackers']})"
        raise BadInput("TRACKER", "a package is not installed", where=where, found=", ".join(missing),
                       fix=f"pip install 'penteract[{','.join(missing)}]', or --output.trackers none")  # fmt: skip
