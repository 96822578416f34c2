"""Telling a run's values (`--parallel.tp 2`, `parallel.tp=2`) from the options of a verb."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FLAG = re.compile(r"--[A-Za-z_][\w-]*\.[^=]*(=.*)?", re.DOTALL)
_PAIR = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)+=.*", re.DOTALL)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words of the verb, the overrides as `resolve` takes them).

    A dotted flag takes the next word as its value unless that word is a flag. Everything after `--` is the verb's.
    """
    verb: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*verb, word, *rest], overrides
        if _PAIR.fullmatch(word):
            overrides.append(word)
        elif found := _FLAG.fullmatch(word):
            overrides.append(word)
            if not found[1] and rest and not rest[0].startswith("--"):
                overrides.append(rest.pop(0))
        else:
            verb.append(word)
    return verb, overrides
