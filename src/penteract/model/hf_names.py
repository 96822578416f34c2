"""The mapping between our tensors and those of Hugging Face files: names, slices and layout.

A mapping is data. Every `HfPart` is a box of one of our tensors and its place in one of theirs. So any rectangle of
ours can be read from slices of theirs, and each of theirs written from boxes of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.errors import Bug
from penteract.model.decoder import record
from penteract.model.hf_families import FAMILIES, HfLocation, Rotary

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HfPart:
    """The box `start`, `size` of one of our tensors, stored in tensor `theirs` of shape `shape`.

    `stacked`: ours has an additional first dim (the box has one expert). After that dim, rows are dim 0: they are rows
    `first` … of theirs, which is transposed first if `transposed`, in the row order of `rotary`.
    """

    theirs: str
    shape: Dims
    start: Dims
    size: Dims
    stacked: bool = False
    transposed: bool = False
    first: int = 0
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our tensors. Rows of a table that no part covers are padding, which theirs does not have.

    `copies`: tensors of theirs that are copies of it; they are written, but not required when reading.
    `exact`: it is a router's bias, which stays in fp32 when weights are written in a narrower dtype.
    """

    name: str
    shape: Dims
    parts: tuple[HfPart, ...]
    copies: tuple[str, ...] = ()
    exact: bool = False

    @property
    def padded(self) -> bool:
        """Whether it has elements that no part covers: the padding rows of a table."""
        return sum(prod(part.size) for part in self.parts) < prod(self.shape)


@dataclass(frozen=True, slots=True)
class Theirs:
    """One of their tensors: its shape, and the parts of ours that it consists of."""

    shape: Dims
    parts: list[tuple[Ours, HfPart]] = field(default_factory=list[tuple[Ours, HfPart]])


def hf_names(m: ModelSpec, family: str, vocabulary: int | None = None) -> Mapping[str, Ours]:
    """Every tensor of our checkpoints, in network order, as `family` names and stores it.

    `vocabulary`: rows of their tables; ours may have more. Raises Bug for a parameter that the family has no name for.
    """
    recorded, found = record(m, Mesh(Layout()), 0, 8), dict[str, Ours]()
    for q in recorded.params.values():
        parts = _parts(m, family, q.name, q.shape, vocabulary)
        found[q.name] = Ours(q.name, q.shape, parts, FAMILIES[family].copies(m).get(q.name, ()))
    for op in recorded.tape.ops:
        if op.site.op_name == "tokens_per_expert" and m.moe is not None:
            name, shape = f"{op.site.attrs['name']}/bias", (m.moe.experts,)
            found[name] = Ours(name, shape, _parts(m, family, name, shape, None), exact=True)
    return found


def by_theirs(ours: Mapping[str, Ours], *, copies: bool = False) -> Mapping[str, Theirs]:
    """The inverse mapping: their tensors by name, with or without copies."""
    found: dict[str, Theirs] = {}
    for tensor in ours.values():
        again = [replace(tensor.parts[0], theirs=name) for name in tensor.copies if copies]
        for part in (*tensor.parts, *again):
            found.setdefault(part.theirs, Theirs(part.shape)).parts.append((tensor, part))
    return found


def _parts(m: ModelSpec, family: str, name: str, shape: Dims, vocabulary: int | None) -> tuple[HfPart, ...]:
    """A parameter's parts: one, or one for each expert."""
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "layers" else -1
    stem = ".".join(parts[2:] if layer >= 0 else parts)
    place = FAMILIES[family].places(m).get(stem)
    if place is None:
        raise Bug("NAMES", f"{family} has no name for a parameter", where=name)
    if "{x}" not in place.name:
        rows = vocabulary if vocabulary is not None and stem in ("embedding.weight", "head.weight") else shape[0]
        size = (rows, *shape[1:])
        return (_part(place, place.name.format(i=layer), (0,) * len(shape), size, size),)
    return tuple(
        _part(place, place.name.format(i=layer, x=x), (x, *(0 for _ in shape[1:])), (1, *shape[1:]), shape[1:])
        for x in range(shape[0])
    )


def _part(place: HfLocation, theirs: str, start: Dims, size: Dims, stored: Dims) -> HfPart:
    """`stored`: the shape of the part as stored, before transposition."""
    shape: Sequence[int] = (place.rows or stored[0], *stored[1:])
    transposed = place.transposed and len(stored) == 2
    return HfPart(
        theirs, tuple(reversed(shape)) if transposed else tuple(shape), start, size,
        stacked=len(size) > len(stored), transposed=transposed, first=place.first, rotary=place.rotary,
    )  # fmt: skip
