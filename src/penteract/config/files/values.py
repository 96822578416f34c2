"""Values from files and command lines, checked against a type annotation; types are never guessed."""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from penteract.config.files.sections import Count
from penteract.errors import BadInput
from penteract.units import parse_count, printable

Bounds = tuple[float, float]


class Mismatch(Exception):
    """The value does not match the annotation; the text says what would."""


def show(value: object) -> str:
    """A value for a message: as in TOML, printable, and at most 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return printable(text, 60)


def convert(value: object, hint: Any, where: str, *, bounds: Bounds) -> Any:
    """`value` as the type `hint`; raises BadInput("VALUE", …) with `where` if it does not match.

    Numbers must be within `bounds`, ends included; NaN and infinities never are.
    """
    try:
        return _convert(value, hint, bounds)
    except Mismatch as error:
        raise BadInput(
            "VALUE", "not a value for this key", where=where, found=show(value), allowed=str(error)
        ) from None


def _convert(value: object, hint: Any, bounds: Bounds) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _any_of(value, [h for h in get_args(hint) if h is not NoneType], bounds)
    if origin is Literal:
        if value in get_args(hint) and isinstance(value, str):
            return value
        raise Mismatch(" or ".join(get_args(hint)))
    if origin is tuple:
        return _tuple(value, get_args(hint), bounds)
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise Mismatch("true or false")
    if hint is Count:
        return _integer(_count(value), bounds)
    if hint is int:
        return _integer(value, bounds)
    if hint is float:
        return _real(value, bounds)
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise Mismatch("a text of printable characters")


def _any_of(value: object, hints: list[Any], bounds: Bounds) -> Any:
    wanted: list[str] = []
    for hint in hints:
        try:
            return _convert(value, hint, bounds)
        except Mismatch as error:
            wanted.append(str(error))
    raise Mismatch(" or ".join(wanted))


def _tuple(value: object, hints: tuple[Any, ...], bounds: Bounds) -> tuple[Any, ...]:
    repeated = hints[-1] is Ellipsis
    if not isinstance(value, (list, tuple)):
        raise Mismatch("a list" if repeated else f"a list of {len(hints)}")
    items = cast("list[object]", value)
    if repeated:
        return tuple(_convert(v, hints[0], bounds) for v in items)
    if len(items) != len(hints):
        raise Mismatch(f"a list of {len(hints)}")
    return tuple(_convert(v, h, bounds) for v, h in zip(items, hints, strict=True))


def _count(value: object) -> int:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            return parse_count(value)
        except (ValueError, OverflowError):
            pass
    raise Mismatch('a count such as 4096, "1M" (10^6) or "1Mi" (2^20)')


def _integer(value: object, bounds: Bounds) -> int:
    least, most = int(bounds[0]), int(bounds[1])
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise Mismatch(f"a whole number, {least} to {_power(most)}")


def _real(value: object, bounds: Bounds) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and bounds[0] <= cast("float", value) <= bounds[1] and math.isfinite(cast("float", value)):
        return float(cast("float", value))
    raise Mismatch(f"a number, {bounds[0]:g} to {bounds[1]:g}")


def _power(n: int) -> str:
    return f"2^{n.bit_length() - 1}" if n >= 2**20 and n & (n - 1) == 0 else str(n)
