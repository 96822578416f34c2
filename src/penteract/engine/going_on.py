"""What must stay as it was when a run goes on: kept in its checkpoints, and asked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penteract.engine import checkpoint
from penteract.errors import BadInput
from penteract.spec.keys import keys
from penteract.spec.run import RunSpec
from penteract.spec.write import toml_value

_KEYS = {"seed": "training.seed", "sequence_length": "batch.sequence_length", "model": "model",
         "optimizer": "optimizer.kind"}  # fmt: skip
_LAST = "model.name"  # told of where nothing else differs


def promised(spec: RunSpec) -> dict[str, Any]:
    """For a checkpoint's `extra`, as JSON has it."""
    kept = {
        "seed": spec.train.seed, "sequence_length": spec.sequence_length, "model": asdict(spec.model),
        "optimizer": spec.optimizer.kind,
    }  # fmt: skip
    return json.loads(json.dumps(kept))


def check_going_on(folder: Path, spec: RunSpec) -> None:
    """Raise BadInput unless a run of `spec` may go on from the newest checkpoint of the run in `folder`."""
    extra = checkpoint.extra(checkpoint.latest(folder / "checkpoints"))
    then, now = (dict(_leaves({"optimizer": "adamw", **kept})) for kept in (extra, promised(spec)))
    other = sorted((key for key in then | now if then.get(key) != now.get(key)), key=lambda key: key == _LAST)
    if other:
        key, more = other[0], f" (and {len(other) - 1} more values)" * (len(other) > 1)
        known = key in then and key in keys()
        fix = f"--{key} {toml_value(then[key])}, or a new run without --resume" if known else "a new run, no --resume"
        raise BadInput("RESUME", f"the run was trained with another {key}{more}", where="--resume",
                       found=_shown(now, key), allowed=_shown(then, key), fix=fix)  # fmt: skip
    step = int(extra["step"])
    if step >= spec.train.steps:
        raise BadInput("STEPS", "the run is already that far", where="--resume", found=spec.train.steps,
                       allowed=f"> {step}", fix=f"--steps {step + spec.train.steps}")  # fmt: skip


def _leaves(kept: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key of a run file, value); a part of the model that is not there has none."""
    for name, value in kept.items():
        key = f"{prefix}.{name}" if prefix else _KEYS.get(name, "")
        if isinstance(value, dict):
            yield from _leaves(value, key)
        elif key and value is not None:
            yield key, value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return toml_value(values[key])[:80] if key in values else "none"
