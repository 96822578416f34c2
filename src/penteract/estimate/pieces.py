"""The pieces that stages are made of: the embedding, one layer of each kind, the head. Each is recorded once for what
it sees, and every stage of every layout that shows it the same is a sum of them.

Recorded alone, a piece receives its input and hands on its result. In a stage its neighbours do that: the registers at
a border are then born in one piece and die in the next (`composed.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from penteract.estimate.load import Balanced, Load
from penteract.model.decoder import part
from penteract.ops.bodies import body_of
from penteract.ops.collectives import counted
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, lower
from penteract.ops.params import Param
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Call, Site
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.step.places import Life, Span, places
from penteract.units import Bytes, Flops

Kind = str  # "embedding", "head", or the kind of a layer: "dense", "experts"
ENDS: tuple[Kind, ...] = ("embedding", "head")
Sight = tuple[object, ...]  # all of a layout that a piece sees
Wire = tuple[str, str]  # collective, axis


def sight(layout: Layout) -> Sight:
    """Two layouts with the same sight show a piece the same."""
    return (*tape_sight(layout), layout.remake, layout.schedule == "zb_h1")


def tape_sight(layout: Layout) -> Sight:
    """What a piece sees of a layout when it is recorded."""
    lay = layout
    return (lay.tp, lay.cp, lay.ep, lay.expert_tp, lay.context_method if lay.cp > 1 else "", lay.micro_batch_size,
            lay.attention)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """What one pass of a micro-batch through a piece takes on a rank.

    `slots`     bytes kept, by span; without the registers at its borders
    `borders`   the life of what it receives and hands on: value, value, gradient of the second, gradient of the first
    `stream`    bytes of a register at a border
    `crossing`  scratch by action that crosses between layers inside of the piece: (from, to, bytes)
    `scratch`   of one layer, by action
    `routed`    bytes kept whose size is routed, by span; `routed_scratch`: the most at once beside them, by action
    """

    chunk: Chunk
    params: tuple[Param, ...]
    inputs: Mapping[str, Spec]
    slots: Mapping[Span, Bytes]
    borders: tuple[Life | None, Life | None, Life | None, Life | None]
    stream: Bytes
    crossing: Mapping[str, tuple[tuple[tuple[int, int], tuple[int, int], Bytes], ...]]
    scratch: Mapping[str, Bytes]
    flops: Mapping[str, Flops]
    wires: Mapping[Wire, Bytes]
    workspace: Bytes
    routed: Mapping[Span, Bytes]
    routed_scratch: Mapping[str, Bytes]


@dataclass(slots=True)
class Recorder:
    """Records pieces of one model at one sequence length and precision.

    Layouts that differ in what they remake or defer share a tape: it is lowered for each of them.
    """

    model: ModelSpec
    sequence_length: int
    widths: Widths
    tapes: dict[tuple[object, ...], Do] = field(default_factory=dict[tuple[object, ...], Do])
    costs: dict[tuple[Site, str], tuple[Flops, Bytes]] = field(
        default_factory=dict[tuple[Site, str], tuple[Flops, Bytes]]
    )  # FLOPs and workspace of a call

    def kinds(self, layers: range) -> tuple[tuple[Kind, int], ...]:
        """The kinds of these layers in order, runs of the same counted."""
        runs: list[tuple[Kind, int]] = []
        for i in layers:
            kind = "experts" if self.model.has_experts(i) else "dense"
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return tuple(runs)

    def sight_of(self, kind: Kind, layout: Layout, seen: Sight) -> Sight:
        """What a piece sees of `seen`, all that a layout shows. At the ends there is no attention, and no layer to
        remake as a whole, unless the head predicts further ahead, with blocks of its own."""
        lay = layout
        if kind not in ENDS or (kind == "head" and self.model.predict_ahead):
            return seen
        remade = tuple(word for word in lay.remake if word != "*")
        return (lay.tp, lay.cp, lay.micro_batch_size, remade, lay.schedule == "zb_h1")

    def record(self, kind: Kind, layout: Layout) -> Piece:
        """A piece as a layout shows it."""
        do = self._tape(kind, layout)
        chunk = lower(do.tape, layout.remake, split=layout.schedule == "zb_h1")
        return self._measure(chunk, tuple(do.params.values()), layout)

    def _tape(self, kind: Kind, layout: Layout) -> Do:
        key = (kind, *tape_sight(layout))
        if key not in self.tapes:
            do = self.tapes[key] = Do(Mesh(replace(layout, pp=1, vpp=1, schedule="1f1b")))
            layers = () if kind in ENDS else (self._layer(kind),)
            part(do, self.model, layers, self.sequence_length, first=kind == "embedding", last=kind == "head")
        return self.tapes[key]

    def _layer(self, kind: Kind) -> int:
        return next(i for i in range(self.model.layers) if self.model.has_experts(i) == (kind == "experts"))

    def _measure(self, chunk: Chunk, params: tuple[Param, ...], layout: Layout) -> Piece:
        load, widths = Balanced.of(self.model, layout, self.sequence_length), self.widths
        flops, wires, workspace = self._count(chunk, layout, load)
        found = places(chunk, widths)
        alive, ends = found.lives, (chunk.entry, chunk.exit, chunk.exit_gradient, chunk.entry_gradient)
        slots, routed, scratch = Counter[Span](), Counter[Span](), list[tuple[Life, Bytes]]()
        crossing: dict[str, list[tuple[tuple[int, int], tuple[int, int], Bytes]]] = {}
        for r, life in alive.items():
            n = found.sizes.get(r, 0)
            size_ = n or _bytes(chunk.specs[r], widths, load)
            if not life.scratch:
                routed[life.span] += 0 if n else size_
                slots[life.span] += 0 if r in ends else n
            elif not n:
                scratch.append((life, size_))
            elif life.born[:2] != life.dies[:2]:
                crossing.setdefault(life.born[0], []).append((life.born[1:], life.dies[1:], n))
        return Piece(
            chunk=chunk, params=params, inputs={name: chunk.tape.specs[v] for name, v in chunk.tape.inputs.items()},
            slots=+slots, borders=tuple(None if r is None else alive[r] for r in ends),  # type: ignore[arg-type]
            stream=next((found.sizes[r] for r in ends if r is not None), 0),
            crossing={name: tuple(c) for name, c in crossing.items()},
            scratch={name: s.layer for name, s in found.scratch.items()},
            flops=flops, wires=wires, workspace=workspace, routed=+routed, routed_scratch=_most_at_once(scratch),
        )  # fmt: skip

    def _count(self, chunk: Chunk, layout: Layout, load: Load) -> tuple[Counter[str], Counter[Wire], Bytes]:
        """FLOPs by phase, bytes on wires, the largest workspace of a body."""
        flops, wires, workspace = Counter[str](), Counter[Wire](), 0
        for instructions in chunk.actions.values():
            for instruction in instructions:
                call = instruction.call
                if call.phase == "start":
                    spec = counted(call.site.word, call.site.ins[0], call.site.outs[0])
                    wires[call.site.word, str(call.site.attrs["axis"])] += _bytes(spec, self.widths, load)
                elif call.phase != "finish":
                    work, needs = self._cost(call, layout, load)
                    flops[call.phase] += work
                    workspace = max(workspace, needs)
        return +flops, wires, workspace

    def _cost(self, call: Call, layout: Layout, load: Load) -> tuple[Flops, Bytes]:
        site, key = call.site, (call.site, call.phase)
        if key not in self.costs:
            ins, body = shapes(call, load), body_of(site.word, layout)
            work = body.flops(call.phase, ins, site.weights, site.attrs)
            self.costs[key] = work, body.workspace(call.phase, ins, site.weights, site.attrs, self.widths)
        return self.costs[key]


def _most_at_once(registers: list[tuple[Life, Bytes]]) -> dict[str, Bytes]:
    """The most bytes at once, by action, of registers that live in one action alone."""
    most: dict[str, Bytes] = {}
    changes: dict[str, list[tuple[int, int, Bytes]]] = {}
    for life, n in registers:
        changes.setdefault(life.born[0], []).extend([(life.born[2], 0, n), (life.dies[2], 1, -n)])
    for name, events in changes.items():
        now = 0
        for _, _, change in sorted(events):
            now += change
            most[name] = max(most.get(name, 0), now)
    return most


def shapes(call: Call, load: Load) -> list[tuple[int, ...]]:
    """The shapes that a call is about, as numbers."""
    return [tuple(d if isinstance(d, int) else load.received(d.layer, 0) for d in s.shape) for s in call.site.ins]


def _bytes(spec: Spec, widths: Widths, load: Load) -> Bytes:
    return prod(d if isinstance(d, int) else load.received(d.layer, 0) for d in spec.shape) * widths[spec.role]
