"""A rank's step in small: one layer for all that are alike, one micro-batch, and sizes that carry their formula.

What it holds and asks for is what the whole step does, so many times over: `alike` and `times` say how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from penteract.model.decoder import homes, part
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, lower
from penteract.ops.params import Homes, Param, holders
from penteract.ops.symbols import Size, symbolic
from penteract.parallel.data import Bucket, buckets
from penteract.parallel.pipeline import stage_layers
from penteract.schedule.actions import ActionList, Compute, Exchange, computes, stage_of
from penteract.schedule.in_flight import action_lists
from penteract.spec.fp8 import scaled_layers
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.precision import Policy
from penteract.spec.schedules import ScheduleName
from penteract.step.program import Program


@dataclass(frozen=True, slots=True)
class Short(Program):
    """A program of a few layers that has the routers of all."""

    routers: tuple[str, ...] = ()

    @property
    def balanced(self) -> tuple[str, ...]:
        return self.routers


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter that stands for `times` alike, and the line that uses it first."""

    param: Param
    line: str
    times: int

    @property
    def name(self) -> str:
        return anonymous(self.param.name)


@dataclass(frozen=True, slots=True)
class Miniature:
    """`program` has the whole step's chunks in small; its buckets are one for each of `owned`, without padding.

    `layout` is symbolic, while the program's mesh is plain: ranks are numbers.
    `alike[chunk][layer]`: how many layers the recorded one stands for. `buckets`: those of the whole step, plain.
    """

    program: Program
    layout: Layout
    owned: tuple[Owned, ...]
    alike: tuple[Mapping[int, int], ...]
    buckets: tuple[Bucket, ...]

    def times(self, chunk: int, layer: int) -> int:
        return self.alike[chunk].get(layer, 1)

    def once(self) -> Program:
        """Every action of one micro-batch, each bucket summed last."""
        p = self.program
        first = [t for a in p.actions if isinstance(a, Exchange) for t in a.transfers if t.micro == 0]
        walks = [Compute(kind, 0, c) for c, chunk in enumerate(p.chunks) for kind in chunk.actions]  # type: ignore[arg-type]
        return replace(p, actions=(Exchange(tuple(first)), *walks))

    def warm_up(self) -> Program:
        """The whole schedule's actions until the first that goes back."""
        actions = self.program.actions
        backward = next(i for i, a in enumerate(actions) if any(c.kind != "Fwd" for c in computes(a)))
        last = max(i for i in range(backward) if any(c.kind == "Fwd" for c in computes(actions[i])))
        return replace(self.program, actions=actions[: last + 1])


def miniature(
    m: ModelSpec, layout: Layout, sequence_length: int, precision: Policy, *, rank: int, schedule: ScheduleName | None
) -> Miniature:
    """The step of `rank` in small."""
    name, mesh = schedule or layout.schedule, Mesh(layout)
    at = mesh.coordinates(rank)["pp"]
    model, cut, length = symbolic(m, layout, sequence_length)
    stages = [stage_layers(m.layers, layout.stages)[stage_of(at, c, layout.pp)] for c in range(layout.vpp)]
    scaled = scaled_layers(precision.fp8, m.layers, m.predict_ahead)
    alike = tuple(_alike(m, layers, scaled) for layers in stages)
    said = [
        _record(Do(Mesh(cut), scaled), model, length, sorted(some), ends=(layers.start == 0, layers.stop == m.layers))
        for layers, some in zip(stages, alike, strict=True)
    ]
    chunks = tuple(lower(do.tape, layout.remake, split=name == "zb_h1") for do in said)
    owned = tuple(_owned(said, chunks, alike))
    where = homes(m, layout, {o.param.name: at for o in owned})
    program = Short(
        model, mesh, rank, length, precision, chunks, tuple(o.param for o in owned), (), where,
        tuple(_bucket(o.param, where, mesh, Mesh(cut), rank) for o in owned),
        tuple(_actions(name, layout)[at]), {}, _routers(chunks, alike),
    )  # fmt: skip
    whole = list(_whole(said, alike, stages, m))
    real = buckets(
        reversed(whole), homes(m, layout, {q.name: at for q in whole}), mesh, rank, precision
    )  # fmt: skip
    return Miniature(program, cut, owned, alike, real)


def anonymous(name: str) -> str:
    """`layers.*.norm1.weight` for that of any layer."""
    words = name.split(".")
    return ".".join([words[0], "*", *words[2:]]) if words[0] == "layers" else name


def _alike(m: ModelSpec, layers: range, scaled: Collection[int]) -> dict[int, int]:
    """The layers to record, and how many each stands for: one of each kind, and the last, as what follows it may
    keep something else of it."""
    first: dict[tuple[bool, bool], int] = {}
    found = Counter[int]()
    for layer in layers[:-1]:
        found[first.setdefault((m.has_experts(layer), layer in scaled), layer)] += 1
    return {**found, layers[-1]: 1}


def _record(do: Do, m: ModelSpec, length: Size, layers: list[int], ends: tuple[bool, bool]) -> Do:
    part(do, m, layers, length, first=ends[0], last=ends[1])
    return do


def _actions(name: ScheduleName, layout: Layout) -> list[ActionList]:
    return list(action_lists(name, layout.pp, layout.vpp, layout.gradient_accumulation_steps))


def _owned(said: list[Do], chunks: tuple[Chunk, ...], alike: tuple[Mapping[int, int], ...]) -> Iterator[Owned]:
    seen = set[str]()
    for do, chunk, times in zip(said, chunks, alike, strict=True):
        for op in chunk.tape.ops:
            for name in op.site.params:
                if name not in seen:
                    yield Owned(do.params[name], op.site.line, times.get(op.site.layer, 1))
                seen.add(name)


def _bucket(q: Param, where: Homes, mesh: Mesh, cut: Mesh, rank: int) -> Bucket:
    """A parameter as a bucket of its own, summed last. Who holds it is a size too: what cuts it divides the stage."""
    members, size = holders(q, where[q.name], mesh, rank), q.numel(cut)
    count = cut.size("stage") // prod(s.pieces(cut) for s in q.shards) * len(where[q.name])
    assert count == len(members), q.name
    shards = count if mesh.layout.zero and count > 1 else 1
    return Bucket((q,), (0,), size, members, q.decay, across_stages=True, shards=shards)


def _routers(chunks: tuple[Chunk, ...], alike: tuple[Mapping[int, int], ...]) -> tuple[str, ...]:
    """The routers whose choice a bias steers, of all layers."""
    return tuple(
        str(op.site.attrs["name"])
        for chunk, times in zip(chunks, alike, strict=True)
        for op in chunk.tape.ops if op.site.word == "tally"
        for _ in range(times.get(op.site.layer, 1))
    )  # fmt: skip


def _whole(said: list[Do], alike: tuple[Mapping[int, int], ...], stages: list[range], m: ModelSpec) -> Iterator[Param]:
    """The parameters of all layers with plain sizes, in the order of their first use."""
    seen = set[str]()
    for do, recorded, layers in zip(said, alike, stages, strict=True):
        inside = {f"layers.{i}.": [q for n, q in do.params.items() if n.startswith(f"layers.{i}.")] for i in recorded}
        like = {m.has_experts(i): f"layers.{i}." for i in recorded}
        layered = [replace(q, name=q.name.replace(like[m.has_experts(i)], f"layers.{i}."))
                   for i in layers for q in inside[like[m.has_experts(i)]]]  # fmt: skip
        places = {q.name for some in inside.values() for q in some}
        for q in do.params.values():
            for each in layered if q.name in places else [q]:
                if each.name not in seen:
                    seen.add(each.name)
                    yield _plain(each)


def _plain(q: Param) -> Param:
    shards = tuple(replace(s, parts=None if s.parts is None else int(s.parts)) for s in q.shards)
    return replace(q, shape=tuple(map(int, q.shape)), shards=shards)
