"""What a run that starts from weights has where nobody decided it: a learning rate for what is trained already.

Rates of presets and defaults are for a first training. At such a peak, weights lose much of what they know, and without
a warmup the first updates are large, because the optimizer has no moments yet.
"""

from __future__ import annotations

from pathlib import Path

from penteract.cli.resolve.weights import Source
from penteract.config.files.keys import keys
from penteract.config.files.read import read_toml
from penteract.config.resolve.presets import usual_learning_rate
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import run_values, toml_value
from penteract.engine.hf.folder import weights_alone
from penteract.model.count import parameters
from penteract.units import printable, show_path

_PART = 10  # of the peak: most decays end at a tenth, so weights go on as they were trained last
_LONGEST_WARMUP = 100  # steps; a tenth of a shorter decay
_RATE, _WARMUP = "optimizer.learning_rate", "learning_rate.warmup_steps"
_NOT_TAKEN_OVER = {  # from the run that made the weights, and what a line calls it
    "data.source": "data", "tokenizer.source": "tokenizer", "batch.sequence_length": "sequence length",
    "batch.global_batch_size": "sequences a step", "data.pack_documents": "data.pack_documents",
    "data.validation_fraction": "data.validation_fraction", "precision.dtype": "precision",
    "optimizer.kind": "optimizer",
}  # fmt: skip


def init_defaults(source: Source, resolved: Resolved) -> tuple[dict[str, str], list[str]]:
    """The values, by key, and lines that say so. Of a run file's own rate, as `plan` writes it, a line says if it is as
    high as a first training's: it is used."""
    run, chosen, why = resolved.run, dict[str, str](), list[str]()
    peak, whose = _peak(source, resolved)
    rate, origin = f"{peak / _PART:.3g}", resolved.origins[_RATE]
    lines = list[str]()
    if _is_open(resolved, _RATE):
        chosen[_RATE] = rate
        why.append(f"learning rate {rate}, a tenth of {whose}")
    elif not origin.startswith("--") and run.optimizer.learning_rate >= peak:
        lines.append(
            f"note: learning rate {run.optimizer.learning_rate:g} ({origin}) is high for weights that are trained "
            f"already; --{_RATE} {rate} is a tenth of {whose}"
        )
    if _is_open(resolved, _WARMUP):
        warmup = max(1, min(_LONGEST_WARMUP, run.lr_schedule.end(run.train.steps) // _PART))
        chosen[_WARMUP] = str(warmup)
        why.append(f"{warmup} {'step' if warmup == 1 else 'steps'} of warmup")
    return chosen, [f"Chosen to go on from {show_path(source.path)}: {', after '.join(why)}"] * bool(why) + lines


def unlike_its_run(source: Source, resolved: Resolved) -> str:
    """A line that names what differs from the run that made the weights; "" where nothing does, or no run is known."""
    file = _its_run(source)
    if file is None:
        return ""
    then, now = read_toml(file), run_values(resolved.run)
    other = list[str]()
    for key, name in _NOT_TAKEN_OVER.items():
        had = toml_value(then[key].value if key in then else keys()[key].default)
        if had != now[key]:
            other.append(f"{name} {_bare(now[key])} (there {_bare(had)})")
    return f"Unlike the run that made these weights: {', '.join(other)}" if other else ""


def _bare(value: str) -> str:
    """A value as TOML writes it, as a line of words has it."""
    return printable(value.removeprefix('"').removesuffix('"'), 60)


def _its_run(source: Source) -> Path | None:
    """The run file of the training that made the weights, where it is known."""
    if source.theirs or source.model is None or weights_alone(source.model):
        return None
    return source.model / "run.toml"


def _is_open(resolved: Resolved, key: str) -> bool:
    """Whether nobody decided a key. A preset decides for a first training."""
    return resolved.is_open(key) or resolved.origins[key].startswith("preset ")


def _peak(source: Source, resolved: Resolved) -> tuple[float, str]:
    """The peak of the training that made the weights, or a usual one, and whose it is."""
    run = _its_run(source)
    if run is not None and (setting := read_toml(run).get(_RATE)):
        return setting.value, "its run's peak"
    model = resolved.run.model
    return usual_learning_rate(model, parameters(model).total), "a first training's usual peak"
