"""The Python interface: values in, values out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penteract.config.files.machine_file import HERE
from penteract.config.hardware import HEADROOM, Cluster, cluster
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy
from penteract.config.run import RunSpec
from penteract.errors import BadInput, PenteractError
from penteract.planner.ask import as_word, parse_settings

if TYPE_CHECKING:
    from penteract.measure.bench.cases.sweep_question import SweepQuestion
    from penteract.measure.schemas.profile import ProfileFile
    from penteract.measure.schemas.rehearsal import Rehearsal
    from penteract.measure.schemas.sweep import Sweep
    from penteract.planner.plan import Plan
    from penteract.planner.search.progress import Watch

__all__ = ["bench", "calibrate", "plan", "profile", "rehearse", "train"]


def plan(  # noqa: PLR0913 (a question has many parameters)
    model: str | Path | ModelSpec,
    gpus: str | Cluster,
    *,
    sequence_length: int | None = None,
    batch: str | int = "1Mi",
    top: int = 10,
    layout: str | None = None,
    fix: str | None = None,
    tp_across_nodes: bool = False,
    precision: str | Policy | Sequence[str | Policy] | None = None,
    parts: Mapping[str, Any] | None = None,
    modules: str | Sequence[str] = (),
    optimizer: str = "adamw",
    headroom: float = HEADROOM,
    imbalance: float = 1.0,
    packages: str | Collection[str] | None = None,
    number: int = 1,
    watch: Watch | None = None,
    workers: int | None = None,
) -> Plan:
    """The best layouts of one training step of `model` on `gpus`, as `penteract plan` finds them. Needs no torch.

    `model`: a published model's name, a config.json or its folder, or a spec. `gpus`: "8xH200", "64x8xH100".
    `batch`: tokens of a step ("1Mi"), or sequences ("128seqs"). `layout`: price this one alone ("tp=2,pp=2").
    `fix`: hold these settings ("tp=2/4,recompute=none"). `headroom`: share of a GPU's memory kept free of tensors.
    `imbalance`: tokens that the experts of the fullest GPU get, over the mean, where ep > 1.
    `packages`: of kernels that the GPUs' hosts have ("flash-attn-4,quack-kernels", "none"); by default all that
    `penteract[gpu]` installs, and with `gpus` "here" those that are installed.
    `precision`: a recipe, or several to choose among ("bf16,fp8_tensorwise"). By default bf16, on CPUs fp32.
    `parts`: other keys of a run file's `[precision]` ({"moments": "int8", "fp8_gather": True}).
    `modules`: precision of single parameters, by name ("*:moments=int8,embedding*:moments=fp32").
    `number`: raise BadInput as soon as the search knows that fewer than `number` layouts fit.
    `watch` is called every tenth of a second with the progress: seconds, layouts priced and left, the best so far.
    `workers`: processes that search ahead of this one, on Linux; by default one for each idle core, and none in a
    process that has threads. The answer is the same.
    Raises BadInput, naming what is allowed and the fix. Ctrl-C raises Stopped, a subclass of KeyboardInterrupt: its
    `plan` has what was found so far, with `complete` False.
    """
    from penteract.planner.plan import estimator, plan_layouts, plan_one  # here: what starts a command needs none of it
    from penteract.planner.question import question
    from penteract.planner.search.collector import uncollected

    pins = parse_settings(fix, flag="--fix", several=True) if fix else {}
    ask = question(
        model, gpus, sequence_length=sequence_length, batch=batch, precision=precision, parts=parts,
        modules=modules, optimizer=optimizer, headroom=headroom, imbalance=imbalance, tp_across_nodes=tp_across_nodes,
        pins=pins, packages=packages,
    )  # fmt: skip
    with uncollected():
        if layout is not None:
            return plan_one(ask, parse_settings(layout, flag="--layout", several=False), estimator)
        return plan_layouts(ask, estimator, top=top, number=number, watch=watch, workers=workers)


def rehearse(
    run: str | Path | RunSpec | None = None,
    rank: int = 0,
    gpus: str | Cluster | None = None,
    *,
    corners: bool = False,
    preset: str | None = None,
    headroom: float = HEADROOM,
    **settings: Any,
) -> Rehearsal:
    """What a rank of a run would allocate, call and send, as `penteract rehearse` finds it. Needs torch, but no GPU.

    `run`: a run file, or a resolved run. `rank`: the one to rehearse; with `corners` a rank of every kind instead.
    `gpus`: those that it is for, "512x8xH100": then the answer knows whether it fits. `headroom`: share of a GPU's
    memory kept free of tensors. `settings`: as of `train`. The answer's `mismatches` are faults of the program, none in
    a sound one. Raises BadInput.
    """
    from penteract.config.resolve.resolved_run import resolve
    from penteract.measure.rehearse.rehearsing import rehearse_run  # here: it needs torch
    from penteract.planner.settle_budget import settle_budget

    on = cluster(gpus) if isinstance(gpus, str) else gpus
    if not isinstance(run, RunSpec):
        resolved = resolve(run, preset, _settings(settings), on.gpus if on is not None else None)
        run = settle_budget(resolved)[0].run
    elif settings or preset:
        raise BadInput("USAGE", "a resolved run takes no settings", found=", ".join([*settings, *[preset or ""]]),
                       fix="dataclasses.replace the run")  # fmt: skip
    return rehearse_run(run, rank, on, every_kind=corners, headroom=headroom)


def train(run: str | Path | None = None, *, preset: str | None = None, **settings: Any) -> dict[str, Any]:
    """Run `penteract train --json` in a subprocess; returns the JSON object that it prints last.

    `settings` are dotted keys with `__` for the dot: `parallel__tp=2`, `training__steps=50`.
    Raises PenteractError with the error of the run.
    """
    return _last_json("train", _words(run, preset, settings))


def profile(
    run: str | Path | None = None,
    *,
    preset: str | None = None,
    gpus: str | Path | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> ProfileFile:
    """Run `penteract profile --json` in a subprocess: a run's step, measured beside its prediction.

    `gpus`: a hardware file of this machine, or a name as of `plan`. `out`: the folder to write. `settings`: as of
    `train`. Raises PenteractError with the error of the run.
    """
    options = [word for name, value in (("--gpus", gpus), ("--out", out)) if value for word in (name, str(value))]
    return cast("ProfileFile", _last_json("profile", [*_words(run, preset, settings), *options]))


def calibrate(out: str | Path | None = None, *, budget: float = 480.0, ranks: int | None = None) -> Cluster:
    """Run `penteract calibrate` in a subprocess: measure this machine; returns it as `plan` takes it.

    `out`: the hardware file to write, `.toml`; by default the one that `gpus="here"` means. `budget`: seconds; what the
    file has already is not measured again. `ranks`: between how many devices links are measured, by default all GPUs;
    1: none. Raises PenteractError with the error of the command.
    """
    words = ["--budget", str(budget), *(["--out", str(out)] if out is not None else [])]
    words += ["--ranks", str(ranks)] if ranks is not None else []
    _run("calibrate", words)
    return cluster(str(out) if out is not None else HERE)


def _words(run: str | Path | None, preset: str | None, settings: Mapping[str, Any]) -> list[str]:
    words = [str(run)] if run is not None else []
    words += ["--preset", preset] if preset else []
    return [*words, *_settings(settings)]


def _settings(named: Mapping[str, Any]) -> list[str]:
    return [f"{key.replace('__', '.')}={as_word(value)}" for key, value in named.items()]


def _last_json(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a verb prints last."""
    return _run(verb, [*words, "--json"])


def _run(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """A verb in a process of its own. -> the JSON object that it prints last; empty where it prints none."""
    import subprocess  # here: only runs start processes

    done = subprocess.run(
        [sys.executable, "-m", "penteract", verb, *words], capture_output=True, text=True, check=False
    )
    printed = done.stdout.strip().splitlines()[-1:]
    last: dict[str, Any] = json.loads(printed[0]) if printed and printed[0].startswith("{") else {}
    if done.returncode:
        row: dict[str, str] = last.get("error", {})
        error = PenteractError(
            row.get("code", verb.upper()), row.get("what", done.stderr.strip()[-500:]), where=row.get("where", ""),
            found=row.get("found", ""), allowed=row.get("allowed", ""), fix=row.get("fix", ""),
        )  # fmt: skip
        error.exit_code = done.returncode
        raise error
    return last


def bench(sweep: str | Path | SweepQuestion, out: str | Path, *, watch: Callable[[Sweep], None] | None = None) -> Sweep:
    """Run a sweep as `penteract bench` does, on this machine; returns all its cases, with what was measured.

    `sweep`: a SWEEP.toml, or the question as a value. `out`: its folder; if the same sweep was begun there, it goes on.
    `watch` is called twice a second with the sweep as it is. Raises BadInput for a question that makes no cases, or
    where `out` holds another sweep. A case that fails raises nothing: its status says how it ended.
    """
    from penteract.cli.resolve.gpu_defaults import card_here, settle_defaults  # here: only runs need what they import
    from penteract.measure.bench.cases.sweep_file import read_sweep
    from penteract.measure.bench.sweep_run import SweepRun, again, cases_of, make, settings_of
    from penteract.measure.schemas.sweep_folder import SweepFolder

    asked = read_sweep(Path(sweep)) if isinstance(sweep, str | Path) else sweep
    folder = SweepFolder(Path(out))
    if folder.exists:
        again(folder, asked)
    else:
        cases = cases_of(asked, lambda run, anew: settle_defaults(run, card_here(run.run.precision.device), anew)[0])
        make(folder, settings_of(asked, cases, "penteract.bench"), cases)
    return SweepRun(folder, watch=watch or (lambda sweep: None)).go()
