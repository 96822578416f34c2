"""Who holds which part of a parameter, and whose optimizer states each element of a rank's part has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from math import prod

from penteract.config.mesh import Mesh
from penteract.explore.amounts import share
from penteract.explore.answers.ranks.rank_runs import count_text, flat, ranks_text, runs_of
from penteract.explore.schemas.page_values import Fact
from penteract.explore.schemas.ranks_schema import HeldParameter, HeldPart, ParameterChoice, StateShard
from penteract.ops.params import Param
from penteract.parallel.data import Bucket
from penteract.step.program import Program
from penteract.units import show_bytes, show_count, show_whole

_LAYER = re.compile(r"layers\.(\d+)\.")
_WIDEST, _HIGHEST = 6.0, 1.0  # of a drawing, width over height
_GAP = 0.12  # between experts' matrices, of one's width
_SHARDED = {1: "optimizer states", 2: "gradient and optimizer states", 3: "values, gradient and optimizer states"}


def choices(p: Program) -> list[ParameterChoice]:
    """The parameters of a rank, in the order of forward; those of equal layers are one."""
    found = list[ParameterChoice]()
    alike = dict[object, list[Param]]()
    for q in reversed(p.params):
        alike.setdefault((_LAYER.sub("layers.*.", q.name), q.shape, q.shards), []).append(q)
    for some in alike.values():
        text = some[0].name if len(some) == 1 else f"{_LAYER.sub('layers.*.', some[0].name)} · {len(some)} layers"
        found.append({"name": some[0].name, "text": text})
    return found


def held(p: Program, name: str) -> HeldParameter:
    """Who holds the parameter `name`; one that the rank does not hold is its first."""
    by_name, listed = {q.name: q for q in p.params}, choices(p)
    first = (by_name[one["name"]] for one in listed if "layers." in one["name"])
    q = by_name.get(name) or next((one for one in first if len(one.shape) > 1), by_name[listed[0]["name"]])
    parts = list(_parts(q, p))
    own = next(part for part in parts if part["own"])
    states = list(_states(q, p))
    return {
        "name": q.name, "text": next((one["text"] for one in listed if one["name"] == q.name), q.name),
        "shape": " × ".join(map(show_whole, q.shape)), "wide": _wide(q), "parts": parts,
        "facts": _facts(q, p, parts, own), "states": states,
        "states_ranks": flat(runs_of(sorted(one["rank"] for one in states))) if states else own["ranks"],
        "states_text": _zero(q, p, len(states)),
    }  # fmt: skip


def _zero(q: Param, p: Program, ranks: int) -> str:
    shards = _bucket(q, p).shards
    if shards == 1:
        return "Each rank that holds this part keeps all of its optimizer states."
    own = "one has" if ranks == 1 else f"{show_whole(ranks)} have"
    return (f"ZeRO {p.layout.zero} shards {_SHARDED[p.layout.zero]}: of the {count_text(shards)} that share "
            f"rank {p.rank}'s part, {own} some of it.")  # fmt: skip


def _facts(q: Param, p: Program, parts: list[HeldPart], own: HeldPart) -> list[Fact]:
    width, local = p.widths["parameter"], q.local_shape(p.mesh)
    copies = sum(own["ranks"][2::3])
    cuts = ", ".join(f"{axis} into {number}" for axis, number in q.cut(p.mesh))
    return [
        {"label": "Elements", "text": show_count(prod(q.shape)), "source": " × ".join(map(str, q.shape))},
        {"label": "Cut", "text": cuts or "nowhere", "source": "axes of the mesh that cut it, and into how many parts"},
        {"label": "Parts", "text": show_whole(len(parts)), "source": "different ones; a rank holds one"},
        {"label": "A part", "text": show_bytes(prod(local) * width), "source": " × ".join(map(str, local))},
        {"label": "Ranks with this part", "text": show_whole(copies), "source": "they sum their gradients of it"},
    ]  # fmt: skip


def _parts(q: Param, p: Program) -> Iterator[HeldPart]:
    """Each part, in the order of its elements. Only ranks of its owning stages hold any."""
    mesh = p.mesh
    local, mine = q.local_shape(mesh), q.offset(mesh, p.rank)
    ranks = mesh.ranks(p.owning_pp_ranks[q.name], range(p.layout.rows), range(p.layout.tp))
    at = sorted((q.offset(mesh, rank), rank) for rank in ranks)
    for number, (offset, some) in enumerate(groupby(at, key=lambda one: one[0])):
        holders = runs_of(rank for _, rank in some)
        ends = (f"{a}:{a + n}" for a, n in zip(offset, local, strict=True))
        yield {
            "number": number, "own": offset == mine, "box": _box(q, offset, local), "slice": f"[{', '.join(ends)}]",
            "ranks": flat(holders), "text": ranks_text(holders),
        }  # fmt: skip


def _matrix(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How many matrices a parameter is drawn as, and their rows and columns: a vector is one row."""
    rows, columns = (1, *shape)[-2:]
    return prod(shape[:-2]), rows, columns


def _wide(q: Param) -> float:
    number, rows, columns = _matrix(q.shape)
    each = min(_WIDEST, max(_HIGHEST, columns / rows))
    return min(_WIDEST, each * (number + _GAP * (number - 1)))


def _box(q: Param, offset: tuple[int, ...], local: tuple[int, ...]) -> list[float]:
    """Where a part lies: matrices of experts are beside each other, those of one part as one box."""
    number, rows, columns = _matrix(q.shape)
    first = offset[0] if len(q.shape) > 2 else 0
    experts = local[0] if len(q.shape) > 2 else 1
    each = 1 / (number + _GAP * (number - 1))
    left, width = first * each * (1 + _GAP), each * (experts + _GAP * (experts - 1))
    across, wide = (offset[-1], local[-1]) if local else (0, 1)
    top, high = (offset[-2], local[-2]) if len(local) > 1 else (0, 1)
    if experts > 1:
        return [left, top / rows, width, high / rows]
    return [left + across / columns * each, top / rows, wide / columns * each, high / rows]


def _bucket(q: Param, p: Program) -> Bucket:
    return next(b for b in p.buckets if any(one.name == q.name for one in b.params))


def _states(q: Param, p: Program) -> Iterator[StateShard]:
    """The ranks of the shard group with elements of the rank's part, in their order; none if it is not sharded."""
    b = _bucket(q, p)
    if b.shards == 1:
        return
    at = next(offset for one, offset in zip(b.params, b.offsets, strict=True) if one.name == q.name)
    size = q.numel(p.mesh)
    for rank in b.shard_ranks:
        shard = b.shard(rank)
        begin, end = max(at, shard.start) - at, min(at + size, shard.stop) - at
        if begin < end:
            yield {"rank": rank, "elements": f"{show_whole(begin)} to {show_whole(end - 1)}",
                   "share": share(end - begin, size)}  # fmt: skip


def axes_of(mesh: Mesh, rank: int) -> str:
    """A rank's coordinates, to read."""
    at = mesh.coordinates(rank)
    names = [name for name in ("pp", "dp", "cp", "tp", "ep") if getattr(mesh.layout, name) > 1]
    return ", ".join(f"{name} {at[name]}" for name in names) or "the only rank"
