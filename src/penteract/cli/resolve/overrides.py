"""A run's values (`--parallel.tp 2`, `parallel.tp=2`), separated from a verb's options; those that `plan` takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penteract.config.files.read import is_setting, read_overrides
from penteract.config.run import PARTS
from penteract.errors import BadInput
from penteract.planner.ask import LAYOUT_SETTINGS, as_word

_FLAG = re.compile(r"--[A-Za-z_][\w-]*\.[^=]*(=.*)?", re.DOTALL)
_GRID = "--grid"  # its value looks like a setting
_PLAN_OPTIONS = {  # the option of `plan` that does what a key of a run file does
    "precision.dtype": "--precision {}", "batch.sequence_length": "--seq {}",
    "batch.global_batch_size": "--batch {}seqs", "batch.global_batch_tokens": "--batch {}",
    "optimizer.kind": "--optimizer {}",
}  # fmt: skip


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words of the verb, the overrides as `--a.b=v`, `a.b=v`, or `--a.b` for a switch).

    A dotted flag takes the next word as its value unless that word sets something itself.
    Everything after `--` is the verb's, and so is the word after `--grid`.
    """
    verb: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*verb, word, *rest], overrides
        if word == _GRID and rest:
            verb += [word, rest.pop(0)]
        elif found := _FLAG.fullmatch(word):
            takes_next = not found[1] and rest and not is_setting(rest[0])
            overrides.append(f"{word}={rest.pop(0)}" if takes_next else word)
        elif is_setting(word) and not word.startswith("--"):
            overrides.append(word)
        else:
            verb.append(word)
    return verb, overrides


def parts_of_precision(words: Sequence[str]) -> dict[str, Any]:
    """The values of a run that change a recipe (`--precision.moments int8`), by their names in its section.

    Raises BadInput for other values; its fix is the option of `plan` for the same thing, where there is one.
    """
    found = dict[str, Any]()
    for key, setting in read_overrides(words).items():
        section, _, name = key.rpartition(".")
        if section != "precision" or name not in PARTS:
            value = _shown(setting.value)
            fix = _PLAN_OPTIONS.get(key, "--fix {0}={1}" if name in LAYOUT_SETTINGS else "leave it out")
            raise BadInput("USAGE", "plan takes only [precision] keys", where=setting.origin,
                           found=value, allowed=", ".join(f"precision.{part}" for part in PARTS),
                           fix=fix.format(value) if key in _PLAN_OPTIONS else fix.format(name, value))  # fmt: skip
        found[name] = setting.value
    return found


def _shown(value: Any) -> str:
    """A value, or a list of values, as it is typed after an option."""
    return "+".join(map(as_word, value)) if isinstance(value, tuple) else as_word(value)
