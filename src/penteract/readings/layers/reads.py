"""Answers kept by what was read of a layout while they were made: which fields those are is noted, and never listed.

Who makes an answer is handed a `View` of the layout, which notes each field that is read. The answer is found again by
the values of these fields. Fields come in the order in which they are read, as what is read later may hang on what was
read before: they make a tree, whose leaves are the answers. Reading the tree is reading the layout: where a view asks
for an answer that is there already, the fields on the way to it are noted in that view too.

What an answer hangs on beside the layout is its `key`, values that are looked at whole. All else must be the same for
as long as there are answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from inspect import isfunction
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from penteract.config.layout import Layout

_A = TypeVar("_A")
_P = ParamSpec("_P")


class _Sealed:
    """In place of the layout of a view whose answer is kept: a field that is read later would not be in its key."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a layout is read after what hangs on it was answered")


_SEALED = _Sealed()


class View:
    """A layout whose fields are noted as they are read. A property counts as one field, and methods read theirs."""

    # What was read lies in the instance's own dictionary: the second read is that of any attribute.
    __slots__ = ("__dict__", "_of")

    def __init__(self, of: object) -> None:
        """`of`: the layout whose fields are read."""
        self._of = of

    def __getattr__(self, name: str) -> Any:
        """The first read of a field: it is fetched from the layout and noted."""
        value = self.__dict__[name] = getattr(self._of, name)
        return value

    def seal(self) -> dict[str, Any]:
        """The fields that were read, with their values; no other can be from now on."""
        self._of = _SEALED
        return self.__dict__

    def __eq__(self, other: object) -> bool:
        """Raises TypeError: fields of a view are compared, never the view."""
        raise TypeError("a view of a layout is not compared: its fields are")

    __hash__ = None  # type: ignore[assignment]


class _Changed(View):
    """A layout with other values of some fields; of the others, who is read notes it."""

    __slots__ = ()

    def __init__(self, of: object, fields: dict[str, Any]) -> None:
        self._of = of
        self.__dict__ = fields


# Methods are those of a layout, on the view; what follows from changed fields follows from the view's own.
for _name, _value in vars(Layout).items():
    if isfunction(_value) and not _name.startswith("__"):
        setattr(View, _name, _value)
    elif isinstance(_value, property):
        setattr(_Changed, _name, _value)


def changed(layout: Layout, **fields: Any) -> Layout:
    """As `dataclasses.replace`, which would read every field."""
    return cast(Layout, _Changed(layout, fields))


class _Fork(dict[Any, Any]):
    """By the values of fields that are read here: a further fork, or an answer in a tuple of its own."""

    __slots__ = ("names", "read")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.read = attrgetter(*names)  # of one name its value, of several a tuple

    def values_of(self, reads: dict[str, Any]) -> Any:
        return reads[self.names[0]] if len(self.names) == 1 else tuple([reads[name] for name in self.names])


class Memo(Generic[_A]):
    """Answers to one question, each kept by its key and by what making it read of a layout."""

    __slots__ = ("_roots",)

    def __init__(self) -> None:
        """Begin without answers."""
        self._roots: dict[Hashable, Any] = {}

    def ask(self, layout: Layout, key: Hashable, make: Callable[..., _A], *about: Any) -> _A:
        """What `make(*about, layout)` says, of a view of the layout, or said when all that it read was the same."""
        node: Any = self._roots.get(key)
        while type(node) is _Fork:
            node = node.get(node.read(layout))
        return self._make(layout, key, make, about) if node is None else node[0]

    def _make(self, layout: Layout, key: Hashable, make: Callable[..., _A], about: tuple[Any, ...]) -> _A:
        view = View(layout)
        answer = make(*about, cast(Layout, view))
        self._keep(layout, key, view.seal(), answer)
        return answer

    def _keep(self, layout: Layout, key: Hashable, read: dict[str, Any], answer: _A) -> None:
        reads = read.copy()
        into: dict[Any, Any] = self._roots
        at: Any = key
        while isinstance(fork := into.get(at), _Fork):
            if fork.names[0] not in reads:  # read on other ways alone: any answer may be kept for this value only
                reads[fork.names[0]] = getattr(layout, fork.names[0])
            known = next((i for i, name in enumerate(fork.names) if name not in reads), len(fork.names))
            if known < len(fork.names):
                fork = into[at] = _split(fork, known)
            into, at = fork, fork.values_of(reads)
            for name in fork.names:
                del reads[name]
        if reads:
            into[at] = fork = _Fork(tuple(reads))
            into, at = fork, fork.values_of(reads)
        into[at] = (answer,)

    def __len__(self) -> int:
        """How many answers there are."""
        return sum(map(_leaves, self._roots.values()))


def _split(fork: _Fork, first: int) -> _Fork:
    """The same with its `first` names alone, and the others one fork further."""
    out, rest = _Fork(fork.names[:first]), fork.names[first:]
    for values, node in fork.items():
        at = values[0] if first == 1 else values[:first]
        below = out.setdefault(at, _Fork(rest))
        below[values[first] if len(rest) == 1 else values[first:]] = node
    return out


def _leaves(node: Any) -> int:
    return sum(map(_leaves, node.values())) if isinstance(node, _Fork) else 1


class Memos(dict[str, Memo[Any]]):
    """Of an object whose methods are `tracked`: the answers of each, by its name."""

    def __missing__(self, name: str) -> Memo[Any]:
        """A new memo, for a method that is asked for the first time."""
        memo = self[name] = Memo[Any]()
        return memo


class _Tracks(Protocol):
    @property
    def memos(self) -> Memos: ...


_S = TypeVar("_S", bound=_Tracks)


def tracked(
    method: Callable[Concatenate[_S, Layout, _P], _A],
) -> Callable[Concatenate[_S, Layout, _P], _A]:
    """A method of a layout and of values that make up its key: it answers as it did when it read the same."""
    name = method.__name__

    def make(self: _S, rest: tuple[Any, ...], layout: Layout) -> _A:
        return cast(Callable[..., _A], method)(self, layout, *rest)

    @wraps(method)
    def asked(self: _S, layout: Layout, *rest: Any) -> _A:
        return self.memos[name].ask(layout, rest, make, self, rest)

    return cast(Callable[Concatenate[_S, Layout, _P], _A], asked)
