"""TOML that others wrote, parsed in a time that its size bounds."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_PARTS = 64  # of a dotted key; ours have three
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_PART}[ \t]*\.[ \t]*){{{_MOST_PARTS}}}", re.MULTILINE)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError with what is wrong.

    The parser's time for a key grows with the square of its parts: one of 100,000 takes three seconds. A line of a long
    text, or a string in it, that looks as such a key is refused too.
    """
    if _DEEP_KEY.search(text):
        raise ValueError(f"a key of more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
