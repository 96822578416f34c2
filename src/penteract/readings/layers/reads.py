"""Caches whose keys are the fields of a layout that a function reads. The fields are recorded; nobody lists them.

The function gets a `View` of the layout, which records each field that is read. Its result is cached under the values
of these fields. Which field is read next may depend on the values of those before: so the cache is a tree of fields in
the order of reading, with results as leaves. A lookup reads the layout, too: when it is made through another view, the
fields on the path to the result are recorded in that view.

A result may also depend on its `key`, values that are compared as a whole. Everything else must stay the same while the
cache lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from inspect import isfunction
from operator import attrgetter, itemgetter
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from penteract.config.layout import Layout

_A = TypeVar("_A")
_P = ParamSpec("_P")


class _Sealed:
    """Replaces the layout of a view once its result is cached: a field that is read later would be missing in the
    key."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a layout is read after the result that depends on it was cached")


_SEALED = _Sealed()


class View:
    """A layout that records which fields are read. A property counts as one field; a method reads its own fields."""

    # Read fields are in the instance's own dictionary: the second read is that of any attribute.
    __slots__ = ("__dict__", "_of")

    def __init__(self, of: object) -> None:
        """`of`: the layout whose fields are read; no other `View`, as reads of one are recorded by `Memo`."""
        self._of = of

    def __getattr__(self, name: str) -> Any:
        """The first read of a field: fetch it from the layout, and record it."""
        value = self.__dict__[name] = getattr(self._of, name)
        return value

    def seal(self) -> dict[str, Any]:
        """The fields that were read, with their values. No other field can be read from now on."""
        self._of = _SEALED
        return self.__dict__

    def __eq__(self, other: object) -> bool:
        """Raises TypeError: fields of a view are compared, never the view."""
        raise TypeError("a view of a layout is not compared: its fields are")

    __hash__ = None  # type: ignore[assignment]


class _Changed(View):
    """A layout with other values of some fields. Reads of the other fields are recorded by the view below it."""

    __slots__ = ()

    def __init__(self, of: object, fields: dict[str, Any]) -> None:
        self._of = of
        self.__dict__ = fields


def _not_copied(_: View, **__: Any) -> Layout:
    raise TypeError("a view of a layout is not copied, as that would read every field: use `changed`")


# A view has the methods of a layout, but one. A changed view computes properties itself, from its changed fields.
for _name, _value in vars(Layout).items():
    if isfunction(_value) and not _name.startswith("__"):
        setattr(View, _name, _value)
    elif isinstance(_value, property):
        setattr(_Changed, _name, _value)
setattr(View, Layout.put.__name__, _not_copied)


def changed(layout: Layout, **fields: Any) -> Layout:
    """Like `dataclasses.replace`, which would read every field."""
    return cast(Layout, _Changed(layout, fields))


class _Fork(dict[Any, Any]):
    """A node of the tree: values of the fields that are read here -> a further fork, or a result in a 1-tuple."""

    __slots__ = ("every", "names", "one", "read", "values_of")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.every = frozenset(names)
        self.one = names[0] if len(names) == 1 else None
        self.read = attrgetter(*names)  # of one name its value, of several a tuple
        self.values_of = itemgetter(*names)  # the same, of a dict


class Memo(Generic[_A]):
    """The cached results of one function, by key and by the fields of a layout that it read."""

    __slots__ = ("_roots",)

    def __init__(self) -> None:
        """Begin empty."""
        self._roots: dict[Hashable, Any] = {}

    def ask(self, layout: Layout | View, key: Hashable, make: Callable[..., _A], *about: Any) -> _A:
        """The cached result of `make(*about, layout)` for the same field values, or else its result on a view."""
        node: Any = self._roots.get(key)
        if type(layout) is not View:
            while type(node) is _Fork:
                node = node.get(node.read(layout))
            return self._make(layout, key, make, about) if node is None else node[0]
        # Inside another cached result. All fields of a fork are read and recorded at once: one by one took most of the
        # time of a lookup.
        of, record = layout._of, layout.__dict__
        while type(node) is _Fork:
            values = node.read(of)
            if node.one is None:
                record.update(zip(node.names, values, strict=True))
            else:
                record[node.one] = values
            node = node.get(values)
        return self._make(of, key, make, about, record) if node is None else node[0]

    def _make(
        self, layout: object, key: Hashable, make: Callable[..., _A], about: tuple[Any, ...],
        record: dict[str, Any] | None = None,
    ) -> _A:  # fmt: skip
        """Make a result and cache it. `record`: that of a view which also depends on what the result read."""
        view = View(layout)
        answer = make(*about, cast(Layout, view))
        reads = view.seal()
        if record is not None:
            record.update(reads)
        self._keep(layout, key, reads, answer)
        return answer

    def _keep(self, layout: object, key: Hashable, read: dict[str, Any], answer: _A) -> None:
        reads = read.copy()  # a sealed view may still be read
        into: dict[Any, Any] = self._roots
        at: Any = key
        while isinstance(fork := into.get(at), _Fork):
            if fork.names[0] not in reads:  # only other results read it: cache this one for its present value
                reads[fork.names[0]] = getattr(layout, fork.names[0])
            if not fork.every <= reads.keys():
                fork = into[at] = _split(fork, next(i for i, name in enumerate(fork.names) if name not in reads))
            into, at = fork, fork.values_of(reads)
            for name in fork.names:
                del reads[name]
        if reads:
            into[at] = fork = _Fork(tuple(reads))
            into, at = fork, fork.values_of(reads)
        into[at] = (answer,)

    def __len__(self) -> int:
        """The number of cached results."""
        return sum(map(_leaves, self._roots.values()))


def _split(fork: _Fork, first: int) -> _Fork:
    """The same fork with only its `first` names, and the others one fork further."""
    out, rest = _Fork(fork.names[:first]), fork.names[first:]
    for values, node in fork.items():
        at = values[0] if first == 1 else values[:first]
        below = out.setdefault(at, _Fork(rest))
        below[values[first] if len(rest) == 1 else values[first:]] = node
    return out


def _leaves(node: Any) -> int:
    return sum(map(_leaves, node.values())) if isinstance(node, _Fork) else 1


class Memos(dict[str, Memo[Any]]):
    """The caches of an object's `tracked` methods, by name."""

    def __missing__(self, name: str) -> Memo[Any]:
        """Make a memo, at the first call of a method."""
        memo = self[name] = Memo[Any]()
        return memo


class _Tracks(Protocol):
    @property
    def memos(self) -> Memos: ...


_S = TypeVar("_S", bound=_Tracks)


def tracked(
    method: Callable[Concatenate[_S, Layout, _P], _A],
) -> Callable[Concatenate[_S, Layout, _P], _A]:
    """Cache a method by the fields that it reads of its layout, and by its other arguments, which are the key."""
    name, plain = method.__name__, cast(Callable[..., _A], method)

    def make(self: _S, rest: tuple[Any, ...], layout: Layout) -> _A:
        return plain(self, layout, *rest)

    @wraps(method)
    def cached(self: _S, layout: Layout, *rest: Any) -> _A:
        return self.memos[name].ask(layout, rest, make, self, rest)

    return cast(Callable[Concatenate[_S, Layout, _P], _A], cached)
