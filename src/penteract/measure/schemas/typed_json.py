"""Holding JSON to the types of a schema: files are written by one version and read by another.

A schema is of TypedDicts, whose values stay as they are, or of dataclasses, which `from_json` builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

_T = TypeVar("_T")


def from_json(kind: type[_T], value: object, where: str = "") -> _T:
    """A value of the dataclass `kind`, with its dataclasses inside. Raises ValueError with the first mismatch; `where`
    is the value's path."""
    if wrong := next(mismatches(value, kind, where), ""):
        raise ValueError(wrong)
    return _built(value, kind)


def mismatches(value: object, hint: Any, where: str = "") -> Iterator[str]:
    """Where a value of JSON differs from a type: TypedDicts, dataclasses, lists, tuples of any length, dicts by name,
    literals, unions and plain types.

    Keys that a schema does not know are not reported: a later version may have added them.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint) or is_dataclass(hint):
        yield from _fields(value, hint, where)
    elif origin is Literal:
        if value not in arguments:
            yield f"{where}: {value!r:.40} is none of {', '.join(map(str, arguments))}"
    elif origin in (Union, UnionType):
        found = [list(mismatches(value, one, where)) for one in arguments]
        if all(found):
            yield min(found, key=len)[0]
    elif origin in (list, tuple):
        yield from _items(value, arguments[0], where)
    elif origin is dict:
        yield from _entries(value, arguments[1], where)
    elif hint is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            yield f"{where}: {value!r:.40} is no number"
    elif hint is not Any and type(value) is not (NoneType if hint is None else hint):
        yield f"{where}: {value!r:.40} is not {getattr(hint, '__name__', hint)}"


@cache
def _kinds(hint: Any) -> Mapping[str, tuple[Any, bool]]:
    """Of each key of a TypedDict or a dataclass its type, and whether it may be missing."""
    hints = get_type_hints(hint, include_extras=True)
    if is_dataclass(hint):
        return {
            f.name: (hints[f.name], f.default is not MISSING or f.default_factory is not MISSING) for f in fields(hint)
        }
    return {
        name: (get_args(kind)[0], True) if get_origin(kind) is NotRequired else (kind, False)
        for name, kind in hints.items()
    }


def _fields(value: object, hint: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where or 'the file'}: {value!r:.40} is no object"
        return
    row = cast("Mapping[str, object]", value)
    for name, (kind, optional) in _kinds(hint).items():
        if name in row:
            yield from mismatches(row[name], kind, f"{where}.{name}".lstrip("."))
        elif not optional:
            yield f"{where}.{name}: missing".lstrip(".")


def _items(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where}: {value!r:.40} is no list"
        return
    if kind in (int, str) and {*map(type, cast("list[object]", value))} <= {kind}:
        return  # long lists of numbers are looked at once
    for i, item in enumerate(cast("list[object]", value)):
        yield from mismatches(item, kind, f"{where}[{i}]")


def _entries(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r:.40} is no object"
        return
    for name, item in cast("Mapping[str, object]", value).items():
        yield from mismatches(item, kind, f"{where}.{name}".lstrip("."))


def _built(value: Any, hint: Any) -> Any:
    """A value without mismatches, with dataclasses, tuples and floats where the type has them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _built(value, next(one for one in arguments if not any(mismatches(value, one))))
    if origin in (list, tuple):
        items = [_built(item, arguments[0]) for item in value]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        return {name: _built(item, arguments[1]) for name, item in value.items()}
    if is_dataclass(hint):
        return cast("Any", hint)(**{n: _built(value[n], kind) for n, (kind, _) in _kinds(hint).items() if n in value})
    return float(value) if hint is float else value
