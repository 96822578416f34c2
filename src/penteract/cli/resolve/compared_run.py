"""The run that `--compare` names, and which of its settings would change the numbers by themselves."""

from __future__ import annotations

from pathlib import Path

from penteract.cli.resolve.folders import find_run
from penteract.config.files.keys import keys
from penteract.config.files.read import read_toml
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import run_values, toml_value
from penteract.errors import BadInput
from penteract.units import printable

# Layout, kernels and the size of a micro-batch may differ: they change the order of sums alone.
_NUMBERS = ("model.", "optimizer.", "learning_rate.", "data.", "tokenizer.", "precision.")
_NUMBERS_TOO = ("batch.sequence_length", "batch.global_batch_size", "training.steps", "training.seed")
_OTHERS = ("model.name", "data.allow_change", "precision.device")
_MOST = 6  # settings that a line names


def compared_run(compare: str | None, resolved: Resolved, *, shown: bool) -> Path | None:
    """The run to compare with; if `shown`, a line says which settings make losses differ. Raises BadInput."""
    found = find_run(compare, resolved.run.out, flag="--compare", needs="metrics.jsonl") if compare else None
    if found and not (found / "metrics.jsonl").is_file():
        raise BadInput("RUN", "the run has no metrics.jsonl to compare with", where="--compare", found=found,
                       fix="name a run that has trained a step")  # fmt: skip
    if found and shown and (line := unlike_compared(found, resolved)):
        print(line)
    return found


def unlike_compared(folder: Path, resolved: Resolved) -> str:
    """A line that names the settings which differ and change losses; "" where none does, or the run has no file that
    this version reads."""
    if not (folder / "run.toml").is_file():
        return ""
    try:
        then = read_toml(folder / "run.toml")
    except BadInput:
        return ""
    now, other = run_values(resolved.run), list[str]()
    for key, value in now.items():
        if key not in _OTHERS and (key.startswith(_NUMBERS) or key in _NUMBERS_TOO):
            had = toml_value(then[key].value if key in then else keys()[key].default)
            if had != value:
                other.append(f"{key} {_bare(value)} (there {_bare(had)})")
    if not other:
        return ""
    more = f" and {len(other) - _MOST} more" if len(other) > _MOST else ""
    return f"Unlike {folder.name}, so losses differ by more than rounding: {', '.join(other[:_MOST])}{more}"


def _bare(value: str) -> str:
    """A value as TOML writes it, as a line of words has it."""
    return printable(value.removeprefix('"').removesuffix('"'), 60)
