"""Settings that must not change when a run resumes. Checkpoints store them, and they are compared before ranks start.

The precision may change, because master weights and moments are saved in fp32 whatever the recipe (`saved.py`). Only
fp64 runs save fp64, so a run can't change from or to it. Another precision is logged, and so is a learning rate other
than the one that the next step would have had, and what else changes updates: weight decay, clipping, packed documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from penteract.config.files.keys import keys
from penteract.config.precision.policy import Policy
from penteract.config.resolve.write_run_file import toml_value
from penteract.config.run import RunSpec
from penteract.engine import checkpoint
from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.manifest import Manifest
from penteract.engine.checkpoint.slices import DTYPES
from penteract.engine.dtypes import dtype_of
from penteract.engine.run_folder import checkpoint_folder
from penteract.engine.session.saved import RECIPE_STATE
from penteract.errors import BadInput
from penteract.step.learning_rate import rate

# Names in a checkpoint's `extra` -> keys of a run file.
_KEYS = {"seed": "training.seed", "sequence_length": "batch.sequence_length", "model": "model",
         "optimizer": "optimizer.kind"}  # fmt: skip
_DECAY_END = ("learning_rate.decay_end", "training.steps")  # together they decide where the decay ends
_DEVICE = "precision.device"
_MUONS = ("muon_momentum", "muon_nesterov", "newton_schulz_steps")  # what decides nothing without it
_LAST = "model.name"  # a name is reported only if nothing else differs


def resume_settings(spec: RunSpec) -> dict[str, Any]:
    """The settings that a checkpoint stores in its `extra`, as JSON values. The precision is among them, and what
    decides the learning rate, to log a change."""
    policy = spec.precision.policy
    kept = {
        "seed": spec.train.seed, "sequence_length": spec.sequence_length, "model": asdict(spec.model),
        "optimizer": spec.optimizer.kind, "precision": {"name": policy.name, "policy": asdict(policy)},
        "rate": _rate_settings(spec), "update": _update_settings(spec),
    }  # fmt: skip
    return json.loads(json.dumps(kept))


def check_resume(folder: Path, spec: RunSpec, at: Path | None = None) -> None:
    """Raise BadInput unless a run of `spec` may resume from the newest checkpoint of the run in `folder`: the settings
    agree, and the run has steps left. `at`: the folder of its checkpoints, if they have been moved."""
    stored = manifest.read(checkpoint.latest(at or checkpoint_folder.find(folder)), ())
    extra = stored.extra  # of the first versions, without an optimizer: it was AdamW
    then, now = (dict(_leaves({"optimizer": "adamw", **kept})) for kept in (extra, resume_settings(spec)))
    other = sorted((key for key in then | now if then.get(key) != now.get(key)), key=lambda key: key == _LAST)
    if other:
        key, more = other[0], f" (and {len(other) - 1} more values)" * (len(other) > 1)
        can_set = key in then and key in keys()
        fix = f"--{key} {toml_value(then[key])}, or a new run without --resume" if can_set else "a new run, no --resume"
        raise BadInput("RESUME", f"the run was trained with another {key}{more}", where="--resume",
                       found=_shown(now, key), allowed=_shown(then, key), fix=fix)  # fmt: skip
    _check_numbers(stored, spec.precision.policy)
    step = int(extra["step"])
    if step >= spec.train.steps:
        raise BadInput("STEPS", "the run is already that far", where="--steps", found=spec.train.steps,
                       allowed=f"> {step}", fix=f"--steps {step + spec.train.steps}")  # fmt: skip


def other_precision(extra: Mapping[str, Any], spec: RunSpec) -> str:
    """A warning if the precision of the checkpoint and of the resumed run differ; "" if they agree, or if the
    checkpoint does not record its precision."""
    then, now = extra.get("precision"), resume_settings(spec)["precision"]
    if then is None or then["policy"] == now["policy"]:
        return ""
    return (
        f"trained in {then['name']} so far, goes on in {now['name']}: master weights and moments are converted to the "
        "new dtypes; state that only one of the recipes keeps starts afresh"
    )


def other_rate(extra: Mapping[str, Any], spec: RunSpec, step: int) -> str:
    """A warning if `step`, the first of a resumed run, has another learning rate than by the schedule of the
    checkpoint: a decay over more steps makes the rate rise again. "" if it has the same, or if the checkpoint does not
    record its schedule."""
    now = _rate_settings(spec)
    then = {**now, **extra.get("rate", now)}  # a key that came later changes nothing
    fresh, peak, steps = spec.lr_schedule, then["optimizer.learning_rate"], then["training.steps"]
    old = replace(fresh, **{f.name: then[f"learning_rate.{f.name}"] for f in fields(fresh)})
    had = rate(old, peak, step, steps)
    has = rate(fresh, spec.optimizer.learning_rate, step, spec.train.steps)
    if had == has:
        return ""
    changed = [key for key in now if key not in _DECAY_END and now[key] != then[key]]
    why = [f"{key} is {toml_value(now[key])}, not {toml_value(then[key])}" for key in changed]
    back = [f"--{key} {toml_value(then[key])}" for key in changed]
    before, after = old.end(steps), fresh.end(spec.train.steps)
    if before != after:
        why.append(f"its decay ends at step {after}, not {before}")
        back.append(f"--{_DECAY_END[0]} {before}")
    return (
        f"learning rate {has:.2e} at step {step}, where the schedule so far had {had:.2e}: {', '.join(why)}\n"
        f"{' '.join(back)} keeps the schedule so far"
    )


def other_update(extra: Mapping[str, Any], spec: RunSpec) -> str:
    """A warning if updates are made otherwise than so far, apart from the learning rate; "" if they are not, or if the
    checkpoint does not say how they were."""
    now = json.loads(json.dumps(_update_settings(spec)))
    then = {**now, **extra.get("update", now)}
    changed = [key for key in now if now[key] != then[key]]
    if not changed:
        return ""
    why = ", ".join(f"{key} is {toml_value(now[key])}, not {toml_value(then[key])}" for key in changed)
    return f"goes on with other updates than so far: {why}"


def stays_on_cpus(spec: RunSpec, command: str) -> str:
    """A line if a resumed run computes on the CPU because its file says so, and torch sees GPUs; "" if there are none,
    or if the `command` that resumes it names the device."""
    if spec.precision.device != "cpu" or _DEVICE in command or not torch.cuda.is_available():
        return ""
    return f"this run computes on the CPU as when it began; --{_DEVICE} auto takes the GPUs"


def _rate_settings(spec: RunSpec) -> dict[str, Any]:
    """What decides the learning rate of a step, by keys of a run file."""
    schedule = {f"learning_rate.{name}": value for name, value in asdict(spec.lr_schedule).items()}
    return {"optimizer.learning_rate": spec.optimizer.learning_rate, "training.steps": spec.train.steps, **schedule}


def _update_settings(spec: RunSpec) -> dict[str, Any]:
    """What else decides an update and may change, by keys of a run file."""
    of_optimizer = {f"optimizer.{name}": value for name, value in asdict(spec.optimizer).items()}
    del of_optimizer["optimizer.kind"], of_optimizer["optimizer.learning_rate"]
    if spec.optimizer.kind != "muon":
        of_optimizer = {key: value for key, value in of_optimizer.items() if not key.endswith(_MUONS)}
    return {**of_optimizer, "data.pack_documents": spec.data.pack_documents}


def _check_numbers(stored: Manifest, policy: Policy) -> None:
    """Raise BadInput unless master weights and moments were saved in the dtype that the run reads: fp64 runs save and
    read fp64, all others fp32."""
    state = (entry for name, entry in stored.tensors.items() if not name.endswith(RECIPE_STATE))
    saved_fp64 = any(DTYPES[entry.dtype] == dtype_of("stat", "fp64") for entry in state)
    if saved_fp64 != (policy.stat == "fp64"):
        kept, allowed, fix = (
            ("fp64", "fp64", "--precision.dtype fp64")
            if saved_fp64
            else ("fp32", "all but fp64", "another --precision.dtype")
        )
        raise BadInput("RESUME", f"the run's state is saved in {kept}", where="--resume", found=policy.name,
                       allowed=allowed, fix=f"{fix}, or a new run without --resume")  # fmt: skip


def _leaves(kept: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key of a run file, value) of all settings in nested `kept`; a value of None is left out."""
    for name, value in kept.items():
        key = f"{prefix}.{name}" if prefix else _KEYS.get(name, "")
        if isinstance(value, dict):
            yield from _leaves(value, key)
        elif key and value is not None:
            yield key, value


def _shown(values: Mapping[str, Any], key: str) -> str:
    """A value as TOML, for an error; at most 80 characters."""
    return toml_value(values[key])[:80] if key in values else "none"
