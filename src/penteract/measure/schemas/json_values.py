"""JSON as frozen dataclasses: what a file holds is checked against the fields' types when it is read."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def from_json(kind: type[_T], value: object, where: str = "") -> _T:
    """A value of the dataclass `kind`, with its dataclasses inside. Unknown keys are left out: later versions add some.

    Raises ValueError for a key that is missing or of another type; `where` is its path.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the file'} is no object")
    hints, found = get_type_hints(kind), dict[str, Any]()
    for f in fields(kind):  # pyright: ignore[reportArgumentType] - a dataclass, which no type can say
        path = f"{where}.{f.name}" if where else f.name
        if f.name in value:
            found[f.name] = _read(hints[f.name], value[f.name], path)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**found)


def _read(kind: Any, value: Any, path: str) -> Any:
    """A value of a type: None, a number, a text, a literal, a union, a tuple, a dict by text, or a dataclass."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _one_of(inner, value, path)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple([_read(inner[0], one, f"{path}[{i}]") for i, one in enumerate(value)])  # pyright: ignore
    if origin is dict and isinstance(value, dict):
        return {str(k): _read(inner[1], one, f"{path}.{k}") for k, one in value.items()}  # pyright: ignore
    if is_dataclass(kind) and isinstance(kind, type):
        return from_json(kind, value, path)
    if kind is Any or _is_plain(kind, value):
        return float(value) if kind is float else value
    name = getattr(kind, "__name__", None) if origin is None else str(kind)
    raise ValueError(f"{path} is {value!r:.40}, not {name}")


def _one_of(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    for kind in kinds:
        try:
            return _read(kind, value, path)
        except ValueError:
            continue
    raise ValueError(f"{path} is {value!r:.40}")


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a value is of a plain type. A bool is no number; a whole number is a float too."""
    if kind is NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    return kind in (int, float, str) and isinstance(value, (int, float) if kind is float else kind)
