"""Writes run files: a resolved run with the origin of every value, and a template to start from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args, get_origin

from penteract.config.files.keys import SECTIONS, Key, keys
from penteract.config.files.parse_toml import parse_toml
from penteract.config.files.sections import Kernels
from penteract.config.recompute import MemoryBudget, name_of
from penteract.config.resolve.presets import PRESETS, Preset
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.run import PARTS, RunSpec
from penteract.units import printable

RETRAIN = """\
# A resolved run: every value, and where it came from. It trains the same run again:
#   penteract train run.toml
"""
_DEVICE = re.compile(r"^# device = …  .*$", re.MULTILINE)

# A default that is another where a host has no room: where nobody decided it, a file leaves it to the host that trains.
OF_THE_HOST = ("checkpoint.asynchronous",)

_TEMPLATE_HEAD = """\
# A run of penteract.  penteract train {name}
# A line that starts with "# " shows a value of this run, the preset's or a default; take the "# " away to change it.
# Values on the command line win: penteract train {name} --parallel.tp 2

# Where the run starts from: a model with settings that suit it. With another preset, values below may be others.
# Presets: {presets}, and the names of `penteract plan --models`.
preset = "tiny"
"""


def to_toml(resolved: Resolved, head: str = RETRAIN) -> str:
    """The run as TOML that loads to an equal `RunSpec`; each value's comment names its origin. What is left open, and
    what is the recipe's, is a comment itself. `head`: the lines above the values."""
    lines = [head]
    for section, values in _sections(resolved.run, resolved.budget):
        lines.append(f"[{section}]")
        rows = [_row(f"{section}.{name}", value, resolved) for name, value in values]
        width = max(len(setting) for setting, _ in rows)
        lines += [f"{setting:<{width}}  # {comment}" for setting, comment in rows]
        if section == "batch":
            steps, why = resolved.run.layout.gradient_accumulation_steps, "batch.gradient_accumulation_steps"
            lines.append(f"# gradient_accumulation_steps = {steps}  ({_comment(resolved.origins.get(why, ''))})")
        lines.append("")
    return "\n".join(lines)


def retrain_from(weights: str) -> str:
    """RETRAIN for a run that starts from weights."""
    return RETRAIN.replace("run.toml", f"run.toml --init {printable(quote(weights))}")


def go_on(folder: str) -> str:
    """The lines above the values of a resumed run."""
    return f"""\
# A resumed run: every value, and where it came from. `penteract train run.toml` would begin anew, at step 1.
# This goes on from the last checkpoint; command.txt has the steps at which it has gone on so far:
#   penteract train --resume {printable(quote(folder))}
"""


def with_device(text: str, device: str) -> str:
    """A run's file with the device that its ranks have found, where the file leaves it open."""
    why = "torch sees a GPU here" if device == "cuda" else "torch sees no GPU here"
    return _DEVICE.sub(lambda row: f"{f'device = {toml_value(device)}':<{row[0].find('  #')}}  # derived: {why}", text)


def with_first_origins(resolved: Resolved, file: Path) -> Resolved:
    """The run with what `file` says of each value that was read from it: it is about to be written anew, and would name
    itself. Unchanged if another file was read."""
    if resolved.file is None or resolved.file.resolve() != file.resolve():
        return resolved
    lines, line_of = file.read_text(encoding="utf-8").splitlines(), re.compile(rf"{re.escape(file.name)}:(\d+)")
    origins = {
        key: _comment_of(lines[int(found[1]) - 1]) if (found := line_of.fullmatch(origin)) else origin
        for key, origin in resolved.origins.items()
    }
    return replace(resolved, origins=origins)


def _comment_of(line: str) -> str:
    """The comment of a line of a run file: what stands behind the first # that ends a value."""
    for at in (i for i, letter in enumerate(line) if letter == "#"):
        with suppress(ValueError):
            parse_toml(line[:at])
            return line[at + 1 :].strip()
    return "the run file, without a word"


def _row(key: str, value: object, resolved: Resolved) -> tuple[str, str]:
    """What a file says of a key, and the comment."""
    section, _, leaf = key.rpartition(".")
    comment = _comment(resolved.origins.get(key, ""))
    if key in OF_THE_HOST and comment == "default":
        return f"# {leaf} = {toml_value(value)}", "default, where a host has room for copies of what is saved"
    if value == "auto" and section == "precision" and leaf in PARTS:  # so that another recipe can decide it
        return f"# {leaf} = {toml_value(getattr(resolved.run.precision, leaf))}", comment
    if value == "auto":
        return f"# {leaf} = …", f"{comment}, left open"
    return f"{leaf} = {toml_value(value)}", comment


def run_values(run: RunSpec) -> dict[str, str]:
    """Each key of the run, as `optimizer.learning_rate`, and its value as TOML."""
    return {f"{section}.{name}": toml_value(v) for section, values in _sections(run, None) for name, v in values}


def template(name: str = "run.toml") -> str:
    """A commented run file called `name`: loads as the preset "tiny"; every other key is a comment with its value."""
    lines = [_TEMPLATE_HEAD.format(name=name, presets=", ".join(PRESETS))]
    values = _values_of(PRESETS["tiny"])
    for section in SECTIONS:
        rows = [key for key in keys().values() if key.name.rsplit(".", 1)[0] == section]
        lines.append(f"# [{section}]" if section.startswith("model.") else f"[{section}]")
        if section == "model":
            lines.append('# config = "config.json"  # a Hugging Face model, instead of the preset\'s')
        lines += [_template_row(key, values.get(key.name, key.default)) for key in rows]
        lines.append("")
    return "\n".join(lines)


def _values_of(chosen: Preset) -> Mapping[str, object]:
    """What a preset sets, by key."""
    return {f"model.{f.name}": getattr(chosen.model, f.name) for f in fields(chosen.model)} | dict(chosen.settings)


def _template_row(key: Key, value: object) -> str:
    leaf = key.name.rsplit(".", 1)[-1]
    value = "…" if value is None else toml_value(value)
    choices = get_args(key.hint) if get_origin(key.hint) is Literal else ()
    about = key.about + (f": {' | '.join(choices)}" if choices else "")
    return f"# {leaf} = {value}  # {about}"


def _sections(run: RunSpec, budget: MemoryBudget | None) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """(section, its keys and values) in the order of `SECTIONS`, without absent parts of the model."""
    lay = run.layout
    recomputed: dict[str, Any] = {"recompute": name_of(lay.recompute)}
    if budget:
        bound = {"budget": budget.fraction} if budget.fraction else {"budget_gib": budget.allocated / 2**30}
        recomputed = {"recompute": "budget", **bound, "chosen": name_of(lay.recompute)}
    parts: Mapping[str, Any] = {
        "model": run.model,
        "model.moe": run.model.moe,
        "model.latent": run.model.latent,
        "model.rope_scaling": run.model.rope_scaling,
        "parallel": lay,
        "batch": {
            "sequence_length": run.sequence_length,
            "micro_batch_size": lay.micro_batch_size,
            "global_batch_size": lay.global_batch_size,
        },
        "memory": {
            **recomputed,
            "recompute_every": lay.recompute_every,
            "recompute_first": lay.recompute_first,
            "recompute_else": name_of(lay.recompute_else),
            "offload": lay.offload or "none",
            "offload_every": lay.offload_every,
            "offload_optimizer": lay.offload_optimizer,
            "bucket_bytes": lay.bucket_bytes,
        },
        "kernels": {f.name: getattr(lay, f.name) for f in fields(Kernels)} | {"fuse": lay.fuse or "none"},
        "optimizer": run.optimizer,
        "learning_rate": run.lr_schedule,
        "data": run.data,
        "tokenizer": {"source": run.tokenizer},
        "training": run.train,
        "checkpoint": run.checkpoint,
        "precision": run.precision.changes,
        "limits": run.limits,
        "output": {"folder": run.out, "trackers": run.trackers or "none"},
        "slurm": run.slurm,
    }
    for section in SECTIONS:
        part = parts[section]
        if part is None:
            continue
        named = {f.name: getattr(part, f.name) for f in fields(part)} if is_dataclass(part) else part
        yield section, [(name, value) for name, value in named.items() if f"{section}.{name}" in keys()]


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(toml_value(v) for v in value)}]"  # pyright: ignore[reportUnknownVariableType]
    return repr(value)


def _comment(origin: str) -> str:
    return printable(origin) or "default"
