"""What a run that starts from weights has where nobody decided it: a learning rate for what is trained already.

Rates of presets and defaults are for a first training. At such a peak, weights lose much of what they know, and without
a warmup the first updates are large, because the optimizer has no moments yet.
"""

from __future__ import annotations

from penteract.cli.resolve.weights import Source
from penteract.config.files.read import read_toml
from penteract.config.resolve.presets import usual_learning_rate
from penteract.config.resolve.resolved_run import Resolved
from penteract.engine.hf.folder import weights_alone
from penteract.model.count import parameters

_PART = 10  # of the peak: most decays end at a tenth, so weights go on as they were trained last
_LONGEST_WARMUP = 100  # steps; a tenth of a shorter decay
_RATE, _WARMUP = "optimizer.learning_rate", "learning_rate.warmup_steps"


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
    return chosen, [f"Chosen to go on from {source.path}: {', after '.join(why)}"] * bool(why) + lines


def _is_open(resolved: Resolved, key: str) -> bool:
    """Whether nobody decided a key. A preset decides for a first training."""
    return resolved.is_open(key) or resolved.origins[key].startswith("preset ")


def _peak(source: Source, resolved: Resolved) -> tuple[float, str]:
    """The peak of the training that made the weights, or a usual one, and whose it is."""
    run = None if source.theirs or source.model is None or weights_alone(source.model) else source.model / "run.toml"
    if run is not None and (setting := read_toml(run).get(_RATE)):
        return setting.value, "its run's peak"
    model = resolved.run.model
    return usual_learning_rate(model, parameters(model).total), "a first training's usual peak"
