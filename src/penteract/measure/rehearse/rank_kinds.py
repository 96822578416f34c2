"""Which ranks stand for all others: those that share a group with one rank, and the corners of a layout."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.parallel.pipeline import stage_layers

_AXES = ("tp", "cp", "ep", "dp")


def peers(layout: Layout, rank: int) -> dict[int, str]:
    """The ranks to which `rank` is held, and over which axis: the next one of each of its groups, and the neighbours of
    its pipeline rank."""
    mesh, found = Mesh(layout), dict[int, str]()
    for axis in _AXES:
        group = mesh.group(axis, rank)
        if len(group) > 1:
            found.setdefault(group[(group.index(rank) + 1) % len(group)], axis)
    line = mesh.group("pp", rank)
    for step in (-1, 1):
        if len(line) > 1:
            found.setdefault(line[(line.index(rank) + step) % len(line)], "pp")
    return found


def corners(model: ModelSpec, layout: Layout) -> dict[int, str]:
    """A rank of every kind, with what it stands for: each kind of pipeline rank, at the first and at the last place of
    every other axis."""
    mesh, found = Mesh(layout), dict[int, str]()
    for pp_rank, name in _pp_ranks(model, layout):
        first = pp_rank * layout.rows * layout.tp
        last = first + layout.rows * layout.tp - 1
        found[first] = f"{name}, first of its ranks" if last > first else name
        found.setdefault(last, f"{name}, last of its ranks")
        for axis in _AXES:  # one step along each axis alone: its shards and tokens are others
            group = mesh.group(axis, first)
            if pp_rank == 0 and len(group) > 1:
                found.setdefault(group[-1], f"{name}, last of {axis}")
    return found


def _pp_ranks(model: ModelSpec, layout: Layout) -> Iterator[tuple[int, str]]:
    """Pipeline coordinates whose stages differ: the first, the last, and of those between one of each number of
    layers."""
    if layout.pp == 1:
        yield 0, "the only pipeline rank"
        return
    yield 0, "first pipeline rank"
    cut, seen = stage_layers(model.layers, layout), set[tuple[tuple[bool, ...], ...]]()
    for pp_rank in range(1, layout.pp - 1):
        own = [cut[s] for s in layout.placement.stages[pp_rank]]
        kind = tuple(tuple(model.has_experts(i) for i in c) for c in own)
        if kind not in seen:
            seen.add(kind)
            yield pp_rank, f"pipeline rank {pp_rank} of {layout.pp} ({sum(map(len, own))} layers)"
    yield layout.pp - 1, "last pipeline rank"
