"""`penteract train`: resolve the run, refuse what is invalid, and hand over to the engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from penteract.cli.resolve.folders import find_run
from penteract.cli.resolve.gpu_defaults import card_here, settle_defaults
from penteract.cli.resolve.weights import check_resumable, check_weights, find_weights, words_of
from penteract.cli.resolve.world import launched
from penteract.cli.torch_modules import torch_module
from penteract.config.files.keys import keys
from penteract.config.presets import PRESETS
from penteract.config.rules.resolve import Resolved, resolve
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.planner.settle_budget import settle_budget
from penteract.readings.composed import Composer
from penteract.readings.price import price
from penteract.schedule.draw import draw_generated
from penteract.step.program import check_op_names, compile_step

EXAMPLES = (
    "penteract train",
    "penteract train --parallel.dp 2 --parallel.tp 2 --compare latest",
    "penteract train --init path/to/hf-model --parallel.tp 2",
    "penteract train run.toml --steps 20 optimizer.learning_rate=1e-3",
    "torchrun --nproc-per-node 8 -m penteract train run.toml --parallel.tp 2",
)
_WALKED = 256  # layers times micro-batches: a fraction of a second


def train(  # noqa: PLR0913 (the options of a verb are its parameters)
    run: Annotated[Path | None, Parameter(help="A run file; see `penteract init`.")] = None,
    /,
    *,
    preset: Annotated[
        str | None, Parameter(help=f"Start from {', '.join(PRESETS)}, or a published model: llama-3.1-8b.")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Short for --training.steps.")] = None,
    compare: Annotated[str | None, Parameter(help="A run folder, or latest: compare each step's loss with it.")] = None,
    resume: Annotated[str | None, Parameter(help="A run folder, or latest: continue from its last checkpoint.")] = None,
    init: Annotated[
        str | None, Parameter(help="Weights to start from: a Hugging Face folder, a run folder, or latest.")
    ] = None,
    grace: Annotated[
        float, Parameter(help="Seconds from a scheduler's signal to its kill: said if a step and a save take longer.")
    ] = 30.0,
    json: Annotated[
        bool, Parameter(negative="", help="Print one closing JSON object; steps are in metrics.jsonl.")
    ] = False,
    draw: Annotated[bool, Parameter(negative="", help="Draw the pipeline's schedule and stop.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show tracebacks.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, Parameter(help="Short for --training.log_level.")
    ] = None,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:
    """Train a model, on this machine or on the ranks that torchrun starts.

    Any value of a run file can be set here: `--section.key VALUE` or `section.key=VALUE`.
    """
    if not grace > 0:  # nan neither
        raise BadInput("USAGE", "a time to stop is positive", where="--grace", found=grace, allowed="> 0 seconds")
    launch = launched(os.environ)
    words = [*overrides, *_short_forms(steps, log_level)]
    resumed = find_run(resume, _out_folder(words), flag="--resume", needs="checkpoints/latest") if resume else None
    if resumed:
        check_resumable(resumed)
    if resumed and run is None and preset is None:
        run = resumed / "run.toml"
    weights = find_weights(init, _out_folder(words), flag="--init") if init else None
    if weights and resumed:
        raise BadInput("USAGE", "a resumed run has its own weights", found="--resume and --init", fix="leave one out")
    if weights:
        words = [*words_of(weights, run, preset, words), *words]
        preset = "" if run is None and preset is None else preset
    world, file, named = launch.world if launch else None, run, preset

    def again(more: list[str]) -> Resolved:
        return resolve(file, named, [*more, *words], world)

    resolved = again([])
    check_op_names(resolved.run.layout)
    if not resumed:
        card = card_here(resolved.run.precision.device, launched=launch is not None)
        resolved, line = settle_defaults(resolved, card, again)
        if line and not json and (launch is None or launch.rank == 0):
            print(line)
    resolved, chosen = settle_budget(resolved)
    if chosen and not json and (launch is None or launch.rank == 0):
        print(f"Recomputation {chosen.text()}")
    compared = find_run(compare, resolved.run.out, flag="--compare", needs="metrics.jsonl") if compare else None
    if compared and not (compared / "metrics.jsonl").is_file():
        raise BadInput("RUN", "the run has no metrics.jsonl to compare with", where="--compare", found=compared,
                       fix="name a run that has trained a step")  # fmt: skip
    _check_paths(resolved)
    if weights:
        check_weights(weights, resolved)
    if draw:
        lay, width = resolved.run.layout, shutil.get_terminal_size().columns
        print(draw_generated(lay.schedule, lay.vpp, lay.placement, lay.gradient_accumulation_steps, width=width))
        return 0
    return torch_module("engine.runtime.start", "training needs").train(
        resolved, launched=launch is not None, predicted=lambda: _predicted(resolved.run),
        compare=compared, resume=resumed, init=weights.path if weights else None, grace=grace,
        json=json, debug=debug,
    )  # fmt: skip


def _short_forms(steps: int | None, log_level: str | None) -> list[str]:
    short = {"training.steps": steps, "training.log_level": log_level}
    return [f"{key}={value}" for key, value in short.items() if value is not None]


def _out_folder(overrides: Sequence[str]) -> str:
    """The folder of runs. It is needed before the run file is read, because `--resume latest` finds the file there."""
    given = (word.removeprefix("--").partition("=") for word in reversed(overrides))
    return next((value for key, _, value in given if key == "output.folder"), keys()["output.folder"].default)


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


def _predicted(run: RunSpec) -> int:
    """Bytes that rank 0 will allocate. The command line alone may use both the predictions and the engine.

    Where routing decides sizes, a walk of the step is closer than a sum over layers, which is a bound; a long step has
    the bound, because a walk takes as long as its micro-batches and layers are many.
    """
    kinds, policy = run.optimizer.optimizer_kinds, run.precision.policy
    summed = Composer(run.model, run.sequence_length, policy, kinds).rank(run.layout, 0)
    if not summed.routed or run.layout.gradient_accumulation_steps * run.model.layers > _WALKED:
        return summed.allocated
    return price(
        compile_step(run.model, run.layout, run.sequence_length, precision=policy, optimizer_kinds=kinds)
    ).allocated
