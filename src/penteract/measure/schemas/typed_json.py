"""Holding JSON to the types of a schema: files are written by one version and read by another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, NotRequired, Union, cast, get_args, get_origin, get_type_hints, is_typeddict


def mismatches(value: object, hint: Any, where: str = "") -> Iterator[str]:
    """Where a value of JSON differs from a type: TypedDicts, lists, dicts by name, literals, unions and plain types.

    Keys that a TypedDict does not know are not reported: a later version may have added them.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        yield from _fields(value, hint, where)
    elif origin is Literal:
        if value not in arguments:
            yield f"{where}: {value!r} is none of {', '.join(map(str, arguments))}"
    elif origin in (Union, UnionType):
        found = [list(mismatches(value, one, where)) for one in arguments]
        if all(found):
            yield min(found, key=len)[0]
    elif origin is list:
        yield from _items(value, arguments[0], where)
    elif origin is dict:
        yield from _entries(value, arguments[1], where)
    elif hint is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            yield f"{where}: {value!r} is no number"
    elif hint is not Any and type(value) is not (type(None) if hint is None else hint):
        yield f"{where}: {value!r} is not {getattr(hint, '__name__', hint)}"


def _fields(value: object, hint: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no object"
        return
    row = cast("Mapping[str, object]", value)
    for name, kind in get_type_hints(hint, include_extras=True).items():
        optional = get_origin(kind) is NotRequired
        if name in row:
            yield from mismatches(row[name], get_args(kind)[0] if optional else kind, f"{where}.{name}".lstrip("."))
        elif not optional:
            yield f"{where}.{name}: missing".lstrip(".")


def _items(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where}: {value!r} is no list"
        return
    for i, item in enumerate(cast("list[object]", value)):
        yield from mismatches(item, kind, f"{where}[{i}]")


def _entries(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no object"
        return
    for name, item in cast("Mapping[str, object]", value).items():
        yield from mismatches(item, kind, f"{where}.{name}".lstrip("."))
