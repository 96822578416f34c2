"""Weights named on a command line: a Hugging Face folder, a run's folder, or one of its steps. Torch is not needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penteract.cli.resolve.folders import find_run
from penteract.config.files.read import read_overrides, read_toml
from penteract.config.resolve.resolved_run import Resolved, model_at
from penteract.engine.hf.folder import CONFIG, TOKENIZER, open_folder, refuse_another_model, weights_alone
from penteract.engine.run_folder import checkpoint_folder
from penteract.errors import BadInput
from penteract.units import printable

_RUN, _MANIFEST = "run.toml", "manifest.json"
_MARKS = (CONFIG, _RUN, _MANIFEST)
_ALLOWED = f"a Hugging Face folder (with {CONFIG}), a run's folder ({_RUN}), a step in its checkpoints, or latest"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/name


@dataclass(frozen=True, slots=True)
class Source:
    """`path`: the weights; `model`: the folder that describes their model, None for a step outside a run's folder."""

    path: Path
    model: Path | None
    theirs: bool  # a Hugging Face folder


def find_weights(name: str, out: str, *, flag: str) -> Source:
    """The weights called `name`: a path, or "latest" for the newest run in `out`. Raises BadInput if there are none."""
    path = Path(name)
    try:
        if (path / CONFIG).is_file():
            return Source(path, path, theirs=True)
        if (path / _MANIFEST).is_file():
            return Source(path, checkpoint_folder.run_of(path), theirs=False)
        there = path.is_dir()
        usable = (path / _RUN).is_file() or name == "latest"
    except (OSError, ValueError):  # not a valid path
        there = usable = False
    if not usable:
        raise BadInput("WEIGHTS", "no weights here" if there else "no such folder", where=flag,
                       found=printable(name, 120), allowed=_ALLOWED, fix=_fix(path, out, flag))  # fmt: skip
    run = find_run(name, out, flag=flag, needs="checkpoints/latest")
    checkpoint_folder.find(run)
    return Source(run, run, theirs=False)


def _fix(path: Path, out: str, flag: str) -> str:
    """The weights that were probably meant: a folder of a similar name beside the path, or in the folder of runs."""
    near = dict[str, Path]()
    for folder in (path.parent, Path(out)):
        with suppress(OSError, ValueError):
            near |= {one.name: one for one in folder.iterdir() if any((one / mark).is_file() for mark in _MARKS)}
    if meant := get_close_matches(path.name, near, n=1):
        return f"{flag} {near[meant[0]]}"
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.is_dir():
        return f"hf download {path} --local-dir {path.name}, then {flag} {path.name}"
    return "check the path"


def words_of(source: Source, run: Path | None, preset: str | None, words: Sequence[str]) -> list[str]:
    """The model and tokenizer of the weights as overrides, where neither run file nor command line sets them."""
    given = set(read_overrides(words)) | (set(read_toml(run)) if run is not None else set())
    # Other model keys, such as vocab_size or a window, do not describe a model: they change that of the weights.
    described = preset is not None or given & {"preset", "model.config", "model.layers", "model.hidden_size"}
    found = model_words(source) if not described else []
    if "tokenizer.source" not in given and (tokenizer := tokenizer_of(source)):
        found.append(f"tokenizer.source={tokenizer}")
    return found


def model_words(source: Source) -> list[str]:
    """The model of the weights, as overrides; none for a step outside a run's folder, whose model is not known."""
    if source.model is None:
        return []
    found = [f"model.config={source.model}"]
    if source.theirs and model_at(source.path).mtp_layers and not open_folder(source.path).model.mtp_layers:
        found.append("model.mtp_layers=0")  # the config has layers that the files lack
    return found


def tokenizer_of(source: Source) -> str:
    """The tokenizer.json of the weights; empty when there is none, or tokens are bytes."""
    if source.theirs:
        file = source.path / TOKENIZER
        return str(file) if file.is_file() else ""
    return "" if (setting := tokenizer_setting(source)) == "bytes" else setting


def tokenizer_setting(source: Source) -> str:
    """The `tokenizer.source` of the run that a step is of; empty if it is not known."""
    setting = read_toml(source.model / _RUN).get("tokenizer.source") if source.model else None
    return str(setting.value) if setting is not None else ""


def check_weights(source: Source, resolved: Resolved) -> None:
    """Check that the weights exist, are complete by their headers, and fit the run's model. Raises BadInput or
    CorruptData."""
    if source.theirs:
        open_folder(source.path, resolved.run.model)
    elif source.model is not None:
        refuse_another_model(resolved.run.model, model_at(source.model), source.path, padding=False)


def check_resumable(run: Path) -> None:
    """Raise BadInput if a run's folder holds weights alone."""
    if weights_alone(run):
        raise BadInput("RESUME", "the folder holds weights alone: there is no run to resume", where="--resume",
                       found=run, fix=f"penteract train --init {run}")  # fmt: skip
