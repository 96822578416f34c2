"""What an entry of a file or an option of a command may be: bounds and shapes as values. A refusal names the entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol, cast

from penteract.config.files.values import convert, show
from penteract.errors import BadInput
from penteract.units import printable

Origin = Callable[[str], str]  # the path of an entry -> where it was set, for messages


class Field(Protocol):
    """What one entry may be."""

    def check(self, value: object, path: str, origin: Origin) -> Any:
        """`value` as this entry's type. Raises BadInput with `path`, what was found and what is allowed."""
        ...


def place(path: str, origin: Origin) -> str:
    """An entry and where it was set, as messages show both."""
    at = origin(path)
    return f"{path} ({at})" if at else path


def option(flag: str) -> str:
    """The origin of an option: its name says it all."""
    return ""


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `least` to `most`, ends included; `or_zero`: 0 too, where it means that there is none."""

    kind: type[int] | type[float]
    least: float
    most: float
    or_zero: bool = False

    def check(self, value: object, path: str, origin: Origin = option) -> Any:
        """The number. NaN, infinities, booleans and texts never are."""
        if self.or_zero and value == 0 and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.kind(0)
        try:
            return convert(value, self.kind, place(path, origin), bounds=(self.least, self.most))
        except BadInput as error:
            error.allowed = f"0, or {error.allowed}" if self.or_zero else error.allowed
            raise


@dataclass(frozen=True, slots=True)
class Text:
    """Printable text that is not empty."""

    def check(self, value: object, path: str, origin: Origin = option) -> str:
        """The text."""
        return convert(value, str, place(path, origin), bounds=(0, 0))


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, value: object, path: str, origin: Origin = option) -> bool:
        """The flag."""
        if isinstance(value, bool):
            return value
        raise _wrong(value, path, origin, "true or false")


@dataclass(frozen=True, slots=True)
class Note:
    """Anything that nothing is computed from: a text, a number, a date. With `read` False any shape of it."""

    read: bool = True

    def check(self, value: object, path: str, origin: Origin = option) -> str:
        """The entry as a printable text."""
        if self.read and isinstance(value, (list, dict)):
            raise _wrong(cast("object", value), path, origin, "a text, a number or a date")
        return printable(str(value))[:200] if self.read else ""


@dataclass(frozen=True, slots=True)
class RowList:
    """A list of at least `fewest` rows, each with these cells."""

    cells: tuple[Field, ...]
    fewest: int = 1

    def check(self, value: object, path: str, origin: Origin = option) -> tuple[Any, ...]:
        """The rows as tuples."""
        rows = _list(value, path, origin, f"a list of {self.fewest} or more rows")
        if len(rows) < self.fewest:
            raise _wrong(value, path, origin, f"a list of {self.fewest} or more rows")
        return tuple(FixedList(self.cells).check(row, f"{path}[{i}]", origin) for i, row in enumerate(rows))


@dataclass(frozen=True, slots=True)
class FixedList:
    """A list of exactly these cells."""

    cells: tuple[Field, ...]

    def check(self, value: object, path: str, origin: Origin = option) -> tuple[Any, ...]:
        """The cells."""
        found = _list(value, path, origin, f"a list of {len(self.cells)}")
        if len(found) != len(self.cells):
            raise _wrong(value, path, origin, f"a list of {len(self.cells)}")
        return tuple(
            cell.check(v, f"{path}[{i}]", origin) for i, (cell, v) in enumerate(zip(self.cells, found, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A table with the entries of `required`, and no others but those of `optional`."""

    required: Mapping[str, Field]
    optional: Mapping[str, Field] = field(default_factory=dict[str, Field])

    def check(self, value: object, path: str, origin: Origin = option) -> dict[str, Any]:
        """The entries that are there."""
        found, fields = _table(value, path, origin), {**self.required, **self.optional}
        for name in found:
            if name not in fields:
                near = get_close_matches(name, fields, n=1, cutoff=0.5)
                raise BadInput("KEY", "unknown key", where=place(path, origin) or "the file", found=show(name),
                               allowed="" if near else ", ".join(fields),
                               fix=f"did you mean {near[0]}?" if near else "remove it")  # fmt: skip
        for name in self.required:
            if name not in found:
                raise BadInput("MISSING", "a key is missing", where=origin(path), found=f"no {_under(path, name)}",
                               fix="write it as the file of measured curves in the catalogue does")  # fmt: skip
        return {name: fields[name].check(v, _under(path, name), origin) for name, v in found.items()}


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table of entries of one kind under names of the file's own; `name`: what these may be, if not any text."""

    each: Field
    name: Number | None = None
    fewest: int = 1

    def check(self, value: object, path: str, origin: Origin = option) -> dict[str, Any]:
        """The entries."""
        found = _table(value, path, origin)
        if len(found) < self.fewest:
            raise _wrong(value, path, origin, f"a table of {self.fewest} or more entries")
        for name in found if self.name else ():
            number = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else name
            cast("Number", self.name).check(number, f"a name in {path}", lambda _: origin(path))
        return {name: self.each.check(v, _under(path, name), origin) for name, v in found.items()}


@dataclass(frozen=True, slots=True)
class Either:
    """A text, which is a name, or a table that describes the same."""

    table: Table

    def check(self, value: object, path: str, origin: Origin = option) -> Any:
        """The name or the table."""
        if isinstance(value, Mapping):
            return self.table.check(cast("object", value), path, origin)
        return Text().check(value, path, origin)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _list(value: object, path: str, origin: Origin, allowed: str) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(cast("list[object]", value))
    raise _wrong(value, path, origin, allowed)


def _table(value: object, path: str, origin: Origin) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, object]", value))
    raise _wrong(value, path, origin, "a table")


def _wrong(value: object, path: str, origin: Origin, allowed: str) -> BadInput:
    return BadInput("VALUE", "not a value for this key", where=place(path, origin), found=show(value), allowed=allowed)
