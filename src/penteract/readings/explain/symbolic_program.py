"""A rank's step, reduced: one layer for all equal ones, one micro-batch, and sizes that carry their formula.

Its memory and work, multiplied by `alike` and `times`, are those of the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import Policy
from penteract.model.decoder import owning_pp_ranks, part, shared
from penteract.model.precision_patterns import anonymous, first_like
from penteract.ops.declarations.quantised.fp8 import fp8_state_bytes, reads_quantised_weight
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, lower
from penteract.ops.params import OwningPpRanks, Param, reduce_ranks
from penteract.ops.symbols import Size, symbolic
from penteract.ops.tape import Site
from penteract.parallel.bucket_plans import FsdpUnit
from penteract.parallel.data import Bucket, buckets, shard_groups
from penteract.parallel.pipeline import stage_layers
from penteract.schedule.actions import ActionList, Compute, P2PBatch, computes
from penteract.schedule.in_flight import action_lists
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.step.events import READS, Around
from penteract.step.fsdp import Event
from penteract.step.program import Program, layer_edits, units_of
from penteract.step.ring_buffer import depth
from penteract.step.unit_gathers import gathers

_Reads = Mapping[str, tuple[int, ...]]  # action of a chunk -> the units whose cut parameters it reads, in order


@dataclass(frozen=True, slots=True)
class ShortProgram(Program):
    """A program of a few layers, but with the routers of all layers and all linear layers that keep FP8 state."""

    routers: tuple[str, ...] = ()
    linear_layers: tuple[Site, ...] = ()

    @property
    def fp8_sites(self) -> tuple[Site, ...]:
        return self.linear_layers

    @property
    def balanced(self) -> tuple[str, ...]:
        return self.routers


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter that stands for `times` equal ones, and the line that uses it first."""

    param: Param
    line: str
    times: int
    gathers: int = 0  # all-gathers in a step of all of them, if they are sharded

    @property
    def name(self) -> str:
        """The parameter's name, without the number of its layer."""
        return anonymous(self.param.name)


@dataclass(frozen=True, slots=True)
class SymbolicProgram:
    """A reduced step, with formulas.

    program  the chunks of the whole step with few layers; one bucket for each of `owned`, without padding
    layout   symbolic; the program's mesh has plain numbers, as ranks are numbers
    alike    alike[chunk][layer]: how many layers the recorded layer stands for
    buckets  those of the whole step, with plain numbers
    gathers  how often a step gathers each of their units
    """

    program: Program
    layout: Layout
    owned: tuple[Owned, ...]
    alike: tuple[Mapping[int, int], ...]
    buckets: tuple[Bucket, ...]
    gathers: Mapping[int, int]

    def times(self, chunk: int, layer: int) -> int:
        """How many layers the recorded `layer` of a chunk stands for; 1 if it is not in `alike`."""
        return self.alike[chunk].get(layer, 1)

    def once(self) -> Program:
        """Every action of one micro-batch, with all reductions of buckets at the end."""
        summed: tuple[Event, ...] = tuple([("reduce", b) for b in range(len(self.program.buckets))])
        p = self.program
        first = [t for a in p.actions if isinstance(a, P2PBatch) for t in a.transfers if t.micro == 0]
        chunks = enumerate(p.chunks)
        walks = [Compute(kind, 0, c) for c, chunk in chunks for kind in chunk.actions]  # type: ignore[arg-type]
        actions = (P2PBatch(tuple(first)), *walks)
        return replace(p, actions=actions, events={(len(actions), 0): Around(summed)})

    def warm_up(self) -> Program:
        """The whole schedule's actions up to the last forward before the first backward."""
        actions = self.program.actions
        backward = next(i for i, a in enumerate(actions) if any(c.kind != "Fwd" for c in computes(a)))
        last = max(i for i in range(backward) if any(c.kind == "Fwd" for c in computes(actions[i])))
        return replace(self.program, actions=actions[: last + 1])


def symbolic_program(
    m: ModelSpec,
    layout: Layout,
    sequence_length: int,
    precision: Policy,
    *,
    rank: int,
    schedule: ScheduleName | None,
    optimizer_kinds: OptimizerKinds = PLAIN,
) -> SymbolicProgram:
    """The reduced step of `rank`."""
    name, mesh = schedule or layout.schedule, Mesh(layout)
    at = mesh.coordinates(rank)["pp"]
    model, cut, length = symbolic(m, layout, sequence_length)
    cut_at, split = stage_layers(m.layers, layout), schedule_of(name).split_backward
    stages = [cut_at[s] for s in layout.placement.stages[at]]
    linear_layers, like = precision.linear_layers(m.layers, m.mtp_layers), first_like(m, precision)
    alike = tuple(_alike(layout, layers, like) for layers in stages)
    recorders = [
        _record(
            Do(Mesh(cut), linear_layers), model, length, sorted(some), ends=(layers.start == 0, layers.stop == m.layers)
        )
        for layers, some in zip(stages, alike, strict=True)
    ]
    chunks = tuple(
        lower(do.tape, layout.edit(-1), layer_edits(layout, layers), split=split)
        for do, layers in zip(recorders, stages, strict=True)
    )
    owned = tuple(_owned(recorders, chunks, alike))
    where = owning_pp_ranks(m, layout, {o.param.name: at for o in owned})
    quantised_weights = {
        op.site.params[0] for chunk in chunks for op in chunk.tape.ops if reads_quantised_weight(op.site)
    }
    program = ShortProgram(
        model, mesh, rank, length, precision, chunks, tuple(o.param for o in owned), (), where,
        tuple(
            replace(
                _bucket(o.param, where, mesh, Mesh(cut), rank, shared(m), optimizer_kinds.of(matrix=o.param.matrix)),
                gathered_as="fp8" if o.param.name in quantised_weights else "parameter",
                moments=precision.moments_of(o.param.name),
            )
            for o in owned
        ),
        tuple(_actions(name, layout)[at]), {}, _routers(chunks, alike), _linear_layers(chunks, alike),
    )  # fmt: skip
    units = [
        [_plain_unit(u) for u in _units(do, some, layers, m, like)]
        for do, some, layers in zip(recorders, alike, stages, strict=True)
    ]
    whole = [unit for some in units for unit in some]
    real = buckets(
        _once(whole), owning_pp_ranks(m, layout, {q.name: at for u in whole for q in u.params}), mesh, rank, precision,
        optimizer_kinds=optimizer_kinds,
    )  # fmt: skip
    reads = _reads(chunks, units, real)
    read = [reads[a.chunk].get(a.kind, ()) for a in program.actions if isinstance(a, Compute)] if any(reads) else []
    turns = gathers(read, depth(layout, len(whole)))
    stand_ins = {
        i: _stand_in(i, some, like) for layers, some in zip(stages, alike, strict=True) for i in layers
    }  # fmt: skip
    return SymbolicProgram(program, cut, tuple(_gathered(owned, real, turns, stand_ins)), alike, real, turns)


def _alike(layout: Layout, layers: range, like: Sequence[int]) -> dict[int, int]:
    """The layers to record, and how many each stands for: one of each type, and the last one, since its successor may
    keep something else of it. If layers differ in recomputation or offload, each is recorded."""
    if not layout.uniform:
        return dict.fromkeys(layers, 1)
    first, found = dict[int, int](), Counter[int]()
    for layer in layers[:-1]:
        found[first.setdefault(like[layer], layer)] += 1
    return {**found, layers[-1]: 1}


def _record(do: Do, m: ModelSpec, length: Size, layers: list[int], ends: tuple[bool, bool]) -> Do:
    part(do, m, layers, length, first=ends[0], last=ends[1])
    return do


def _actions(name: ScheduleName, layout: Layout) -> list[ActionList]:
    return list(action_lists(name, layout.pp, layout.vpp, layout.gradient_accumulation_steps))


def _owned(recorders: list[Do], chunks: tuple[Chunk, ...], alike: tuple[Mapping[int, int], ...]) -> Iterator[Owned]:
    seen = set[str]()
    for do, chunk, times in zip(recorders, chunks, alike, strict=True):
        for op in chunk.tape.ops:
            for name in op.site.params:
                if name not in seen:
                    yield Owned(do.params[name], op.site.line, times.get(op.site.layer, 1))
                seen.add(name)


def _bucket(
    q: Param,
    where: OwningPpRanks,
    mesh: Mesh,
    cut: Mesh,
    rank: int,
    both: frozenset[str],
    optimizer_kind: OptimizerKind,
) -> Bucket:
    """A bucket of one parameter, reduced last. The number of ranks that hold it is symbolic, too."""
    members, size = reduce_ranks(q.cut(mesh), where[q.name], mesh, rank), q.numel(cut)
    count = cut.size("dp_cp_tp") // prod(s.num_shards(cut) for s in q.shards) * len(where[q.name])
    assert count == len(members), q.name
    lay, copies = mesh.layout, 1
    shard_ranks, replicate_ranks = shard_groups(members, lay, rank)
    if lay.shard_group:
        each = lay.shard_group if lay.shard_group >= lay.ep or not _by_experts(q) else cut.layout.ep
        copies = cut.layout.dp * cut.layout.cp // each
    shards = count // copies if lay.zero and len(shard_ranks) > 1 else 1
    cuts = lay.zero >= 2 and q.name not in both and len(where[q.name]) == 1 and shards > 1
    return Bucket(
        (q,), (0,), size, members, q.decay, across_pp_ranks=True, shard_ranks=shard_ranks,
        replicate_ranks=replicate_ranks, shards=shards,
        cut_gradients=cuts and not lay.reduce_scatter_once, cut_parameters=cuts and lay.zero == 3,
        optimizer_kind=optimizer_kind, offloaded=lay.offload_optimizer and not optimizer_kind.by_matrix,
    )  # fmt: skip


def _linear_layers(chunks: tuple[Chunk, ...], alike: tuple[Mapping[int, int], ...]) -> tuple[Site, ...]:
    """The linear layers that keep FP8 state, of all layers."""
    return tuple(
        op.site
        for chunk, times in zip(chunks, alike, strict=True)
        for op in chunk.tape.ops if fp8_state_bytes(op.site)
        for _ in range(times.get(op.site.layer, 1))
    )  # fmt: skip


def _routers(chunks: tuple[Chunk, ...], alike: tuple[Mapping[int, int], ...]) -> tuple[str, ...]:
    """The routers with a balancing bias, of all layers."""
    return tuple(
        str(op.site.attrs["name"])
        for chunk, times in zip(chunks, alike, strict=True)
        for op in chunk.tape.ops if op.site.op_name == "tokens_per_expert"
        for _ in range(times.get(op.site.layer, 1))
    )  # fmt: skip


def _by_experts(q: Param) -> bool:
    return any(s.axis == "ep" for s in q.shards)


def _units(do: Do, recorded: Mapping[int, int], layers: range, m: ModelSpec, like: Sequence[int]) -> Iterator[FsdpUnit]:
    """The units of a chunk: the embedding and the head, and all its layers, each like the recorded one of its type."""
    units, first = list(units_of([do], m)), layers.start == 0
    inside = dict(zip(sorted(recorded), units[first:], strict=False))
    yield from units[:first]
    for i in layers:
        yield _as_layer(inside[_stand_in(i, recorded, like)], i)
    yield from units[first + len(inside) :]


def _stand_in(layer: int, recorded: Mapping[int, int], like: Sequence[int]) -> int:
    """The recorded layer that stands for this one."""
    return layer if layer in recorded else next(i for i in recorded if like[i] == like[layer])


def _as_layer(unit: FsdpUnit, layer: int) -> FsdpUnit:
    def name(of: str) -> str:
        return ".".join(["layers", str(layer), *of.split(".")[2:]])

    return replace(
        unit, params=tuple(replace(q, name=name(q.name)) for q in unit.params),
        delayed_weight_gradients=frozenset(map(name, unit.delayed_weight_gradients)),
        quantised_weights=frozenset(map(name, unit.quantised_weights)),
        known_weights=frozenset(tuple(map(name, product)) for product in unit.known_weights),
    )  # fmt: skip


def _once(units: list[FsdpUnit]) -> list[FsdpUnit]:
    """The units, with a parameter of several units only in the first."""
    seen, out = set[str](), list[FsdpUnit]()
    for u in units:
        out.append(replace(u, params=tuple(q for q in u.params if q.name not in seen)))
        seen |= {q.name for q in u.params}
    return out


def _reads(chunks: tuple[Chunk, ...], units: list[list[FsdpUnit]], real: tuple[Bucket, ...]) -> list[_Reads]:
    """The units whose sharded parameters each action of a chunk reads."""
    cut = {q.name for b in real if b.cut_parameters for q in b.params}
    out, number = list[_Reads](), 0
    for chunk, own in zip(chunks, units, strict=True):
        found = dict[str, tuple[int, ...]]()
        for action, instructions in chunk.actions.items():
            calls = (i.call for i in instructions if i.call.phase in READS)
            read = {anonymous(n) for c in calls for n in c.site.params}
            using = [
                number + k
                for k, u in enumerate(own)
                if any(q.name in cut and anonymous(q.name) in read for q in u.params)
            ]
            found[action] = tuple(using if action == "Fwd" else reversed(using))
        out.append({action: some for action, some in found.items() if some})
        number += len(own)
    return out


def _gathered(
    owned: tuple[Owned, ...], real: tuple[Bucket, ...], turns: Mapping[int, int], stand_ins: Mapping[int, int]
) -> Iterator[Owned]:
    """The parameters, with the number of gathers of all layers that each stands for. `stand_ins`: the recorded layer
    for each layer; multi-token prediction blocks stand for themselves."""
    found = Counter[str]()
    for b in real:
        for q in b.params if b.cut_parameters else ():
            at, _, rest = q.name.removeprefix("layers.").partition(".")
            stand_in = f"layers.{stand_ins.get(int(at), at)}.{rest}" if q.name.startswith("layers.") else q.name
            found[stand_in] += turns[b.unit]
    named = {q.name for b in real for q in b.params}
    for o in owned:
        yield replace(o, gathers=found[o.param.name]) if o.param.name in named else o


def _plain(q: Param) -> Param:
    shards = tuple(replace(s, parts=None if s.parts is None else int(s.parts)) for s in q.shards)
    return replace(q, shape=tuple(map(int, q.shape)), shards=shards)


def _plain_unit(unit: FsdpUnit) -> FsdpUnit:
    return replace(unit, params=tuple(_plain(q) for q in unit.params))
