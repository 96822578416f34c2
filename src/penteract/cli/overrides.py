"""Telling a run's values (`--parallel.tp 2`, `parallel.tp=2`) from the options of a verb."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penteract.spec.read import is_setting

_FLAG = re.compile(r"--[A-Za-z_][\w-]*\.[^=]*(=.*)?", re.DOTALL)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words of the verb, the overrides as `--a.b=v`, `a.b=v`, or `--a.b` for a switch).

    A dotted flag takes the next word as its value unless that word sets something itself.
    Everything after `--` is the verb's.
    """
    verb: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*verb, word, *rest], overrides
        if found := _FLAG.fullmatch(word):
            takes_next = not found[1] and rest and not is_setting(rest[0])
            overrides.append(f"{word}={rest.pop(0)}" if takes_next else word)
        elif is_setting(word) and not word.startswith("--"):
            overrides.append(word)
        else:
            verb.append(word)
    return verb, overrides
