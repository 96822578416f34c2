"""A config.json's fields, each checked against bounds; an error names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penteract.config.files.keys import keys
from penteract.config.files.values import show
from penteract.errors import BadInput

_REQUIRED = object()
_UNPRINTABLE = (ValueError, RecursionError, OverflowError)  # numbers of thousands of digits, endless nesting


class Fields:
    """A config's fields by name; null counts as absent."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        """`config`: the parsed config.json; `where`: its path, for error messages."""
        self.config, self.where = config, where

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and is not null."""
        return self.config.get(name) is not None

    def get(self, name: str, key: str, default: Any = _REQUIRED) -> Any:
        """The field, checked as the key `key` of run files. Raises BadInput, CONFIG."""
        value = self.config.get(name)
        if value is None:
            if default is _REQUIRED:
                raise BadInput("CONFIG", "a field is missing", where=self.where, found=f"no {name}", fix=f"add {name}")
            return default
        longest = int(keys()["model.layers"].most)  # of a list, which has an entry for each layer
        if isinstance(value, list) and len(cast("list[Any]", value)) > longest:
            raise self.wrong(name, f"at most {longest} entries", found="more")
        try:
            return keys()[key].check(cast("object", value), self.where)
        except BadInput as error:
            raise self.wrong(name, error.allowed) from None
        except _UNPRINTABLE:
            raise self.wrong(name, keys()[key].about) from None

    def flag(self, name: str, default: bool = False) -> bool:
        """A field that is true or false; `default` if it is absent. Raises BadInput, CONFIG."""
        return self.get(name, "model.tied", default)

    def integer(self, name: str, least: int, most: int, default: int) -> int:
        """A whole number without a key in run files."""
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise self.wrong(name, f"a whole number, {least} to {most}")

    def real(self, name: str, least: float, most: float) -> float:
        """A number without a key in run files; 0 if it is absent."""
        value = self.config.get(name)
        if value is None:
            return 0.0
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        raise self.wrong(name, f"a number, {least:g} to {most:g}")

    def choice(self, name: str, word: str, options: Sequence[str | float | bool], default: Any) -> Any:
        """One of `options`, or UNSUPPORTED: anything else would need `word`."""
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, (str, int, float)) and value in options:
            return value
        raise self.unsupported(name, word, " or ".join(str(o).lower() for o in options))

    def unsupported(self, name: str, word: str, allowed: str) -> BadInput:
        """The error to raise for a valid model that needs something not supported: BadInput, UNSUPPORTED."""
        found = shown(self.config.get(name))
        return BadInput("UNSUPPORTED", f"needs {word}", where=f"{self.where}: {name}", found=found, allowed=allowed)

    def wrong(self, name: str, allowed: str, *, found: str = "") -> BadInput:
        """The error to raise for a field outside of `allowed`: BadInput, CONFIG. `found`: in place of its value."""
        what = f"{name} is not what it should be"
        return BadInput("CONFIG", what, where=self.where, found=found or shown(self.config.get(name)), allowed=allowed)


def shown(value: object) -> str:
    """A value for a message, whatever it is."""
    try:
        return show(value)
    except _UNPRINTABLE:
        return "what cannot be printed"
