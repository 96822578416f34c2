"""`penteract profile`: where a run's step and its memory go, beside what was predicted; and two profiles compared."""

from __future__ import annotations

import json as json_module
import os
import re
import secrets
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penteract.cli.resolve.folders import find_run
from penteract.cli.resolve.gpu_defaults import card_here, settle_defaults
from penteract.cli.resolve.needed_gpus import check_gpus, check_rates
from penteract.cli.resolve.weights import check_weights, find_weights, words_of
from penteract.cli.resolve.world import launched
from penteract.cli.torch_modules import torch_module
from penteract.config.hardware import cluster
from penteract.config.resolve.presets import PRESETS
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.errors import BadInput
from penteract.measure.profile.prediction import estimator_of
from penteract.measure.profile.show.difference import as_difference
from penteract.measure.profile.show.profile_files import write_files
from penteract.measure.profile.show.profile_text import as_text
from penteract.measure.schemas.profile import FILE
from penteract.measure.schemas.profile_reader import read_profile
from penteract.planner.settle_budget import settle_budget
from penteract.units import printable

EXAMPLES = (
    "penteract profile run.toml",
    "penteract profile latest --gpus here.toml",
    "penteract profile --preset tiny parallel.tp=2 parallel.pp=2",
    "penteract profile profiles/before profiles/after",
)


def profile(  # noqa: PLR0913 (the options of a verb are its parameters)
    run: Annotated[str | None, Parameter(help="A run file, a run's folder, or latest.")] = None,
    other: Annotated[str | None, Parameter(help="A second profile: compare the first with it, op by op.")] = None,
    /,
    *,
    preset: Annotated[str | None, Parameter(help=f"Start from {', '.join(PRESETS)}, or a published model.")] = None,
    gpus: Annotated[
        str | None,
        Parameter(help="The rates of the prediction: a hardware file of this machine, or a name such as 8xH200."),
    ] = None,
    init: Annotated[str | None, Parameter(help="Weights to start from, as in train.")] = None,
    out: Annotated[
        Path | None, Parameter(help="The folder to write; it must not exist. By default a new one in profiles/.")
    ] = None,
    all: Annotated[bool, Parameter(negative="", help="Print every op.")] = False,
    json: Annotated[bool, Parameter(negative="", help="Print the profile as JSON.")] = False,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
    overrides: Annotated[Sequence[str], Parameter(parse=False)],
) -> int:
    """Measure a step of a run on all of its ranks, compare it with the prediction, and say what would make it faster.

    Ten steps are timed bare, three more under torch's profiler, and one counts memory. Any value of a run file can be
    set, as in train. Nothing of the run is changed.
    """
    if other is not None:
        ours = {"--preset": preset, "--gpus": gpus, "--init": init, "--out": out}
        words = [*overrides, *(name for name, value in ours.items() if value is not None)]
        return _compare(run, other, words, every=all, json=json)
    resolved, file, weights = _resolved(run, preset, init, gpus, overrides, json=json)
    if gpus is not None:
        estimator_of(resolved.run, cluster(gpus))  # what it cannot predict is refused before anything is measured
    start = torch_module("measure.profile.launching", "profiling needs")
    folder, place = out or _folder(resolved), launched(os.environ)
    if place is not None:
        folder = start.joined(resolved, folder, weights, calibrate=gpus is None, quiet=json)
        if place.rank:
            return 0
    else:
        start.make_folder(resolved, folder)
        if code := start.measure(resolved, folder, weights, calibrate=gpus is None, debug=debug, quiet=json):
            return code
    found: Any = start.result(resolved, folder, file, gpus)
    write_files(folder, found)
    print(json_module.dumps(found.profile) if json else as_text(found.profile, every=all))
    if not json:
        print(f"\n{folder}: {FILE}, profile.html, and trace.json.gz for ui.perfetto.dev")
        print(f"penteract explore --profiles {shlex.quote(str(folder))} shows it in the browser")
    return 0


def _resolved(
    run: str | None, preset: str | None, init: str | None, gpus: str | None, overrides: Sequence[str], *, json: bool
) -> tuple[Resolved, str, Path | None]:
    """The run, the name of its file, and the weights to start from: those of a run's folder are its last."""
    path, trained = Path(run) if run is not None else None, False
    out = next((w.partition("=")[2] for w in overrides if w.startswith("output.folder=")), "runs")
    if path is not None and (run == "latest" or path.is_dir()):
        path, trained = find_run(str(run), out, flag="profile", needs="metrics.jsonl") / "run.toml", True
        init = init or (str(path.parent) if (path.parent / "checkpoints" / "latest").exists() else None)
    weights = find_weights(init, out, flag="--init") if init else None
    words = [*overrides] if weights is None else [*words_of(weights, path, preset, overrides), *overrides]
    place = launched(os.environ)

    def again(more: list[str]) -> Resolved:
        return resolve(path, preset, [*more, *words], place.world if place else None)

    resolved, line = again([]), ""
    card = card_here(resolved.run.precision.device, launched=place is not None)
    if not trained:  # a run that was trained has its kernels in its file
        resolved, line = settle_defaults(resolved, card, again)
    if line and not json and (place is None or place.rank == 0):
        print(line)
    resolved, _ = settle_budget(resolved)
    if place is None:  # a launcher's ranks find their own GPU
        check_gpus(resolved, card)
    if gpus is not None:
        check_rates(resolved.run, card, gpus)
    if weights:
        check_weights(weights, resolved)
    return resolved, str(path or preset or "preset tiny"), weights.path if weights else None


def _folder(resolved: Resolved) -> Path:
    """A new folder's name, of the day, the model and six digits."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", resolved.run.model.name).strip(".-")[:64] or "run"
    return Path("profiles") / f"{datetime.now().astimezone():%Y-%m-%d}_{plain}_{secrets.token_hex(3)}"


def _compare(run: str | None, other: str, words: Sequence[str], *, every: bool, json: bool) -> int:
    """`words`: of the command line that belong to a run, of which there is none."""
    if words:
        raise BadInput("USAGE", "two profiles take no values of a run", found=printable(words[0], 80),
                       fix="leave it out, or name one run")  # fmt: skip
    before, after = read_profile(Path(str(run))), read_profile(Path(other))
    print(as_difference(before, after, every=every, json=json))
    return 0
