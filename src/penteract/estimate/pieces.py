"""The pieces that stages are made of: the embedding, one layer of each kind, the head. Each is recorded once for what
it sees, and every stage of every layout that shows it the same is a sum of them.

Recorded alone, a piece receives its input and hands on its result. In a stage its neighbours do that: the registers at
a border are then born in one piece and die in the next (`composed.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import NamedTuple

from penteract.estimate.load import Balanced, Load
from penteract.estimate.outline import Outline, Saying, saying, sites_of
from penteract.estimate.sized import OPEN, Sized, sized
from penteract.model.decoder import part
from penteract.model.modules import first_like
from penteract.ops.bodies import BODIES, body_of
from penteract.ops.bodies.body import FLOAT
from penteract.ops.bodies.fp8 import remembered
from penteract.ops.collectives import counted
from penteract.ops.do import Do
from penteract.ops.offload import ANCHORS, COPIES
from penteract.ops.params import Param
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site, Tape
from penteract.parallel.tensor import chunk_tokens
from penteract.spec.layout import Edit, Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.modules import Linears
from penteract.spec.precision import Policy
from penteract.step.events import READS
from penteract.step.places import Life, Span, aligned, lay_out
from penteract.units import Bytes

Sight = tuple[object, ...]  # all of a layout that a piece sees
Wire = tuple[str, str]  # collective, axis


class Kind(NamedTuple):
    """The embedding, the head, or a kind of layer: by the first that is like it, and the first place of a stage that
    has its edit."""

    name: str
    place: int = -1


EMBEDDING, HEAD = ENDS = (Kind("embedding"), Kind("head"))


def sight(layout: Layout) -> Sight:
    """Two layouts with the same sight show a piece the same."""
    return (*tape_sight(layout), *layout.edits, layout.schedule == "zb_h1")


def tape_sight(layout: Layout) -> Sight:
    """What a piece sees of a layout when it is recorded."""
    lay = layout
    return (lay.tp, lay.cp, lay.ep, lay.expert_tp, lay.context_method if lay.cp > 1 else "", lay.micro_batch_size,
            lay.attention, lay.loss, lay.loss_chunk)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """What one pass of a micro-batch through a piece takes on a rank.

    `remembered` bytes that its linears keep between steps
    `slots`     bytes kept, by span; without the registers at its borders
    `borders`   the life of what it receives and hands on: value, value, gradient of the second, gradient of the first
    `stream`    bytes of a register at a border
    `crossing`  scratch by action that crosses between layers inside of the piece: (from, to, bytes)
    `scratch`   of one layer, by action
    `routed`    bytes kept whose size is routed, by span; `routed_scratch`: the most at once beside them, by action
    `ring`      bytes on their way to or from the host, by action; `host`: bytes kept there, by span
    """

    outline: Outline
    sites: Sequence[Site]
    bytes: Mapping[int, Bytes]  # of every register
    params: tuple[Param, ...]
    inputs: Mapping[str, Spec]
    remembered: Bytes
    slots: Mapping[Span, Bytes]
    borders: tuple[Life | None, Life | None, Life | None, Life | None]
    stream: Bytes
    crossing: Mapping[str, tuple[tuple[tuple[int, int], tuple[int, int], Bytes], ...]]
    scratch: Mapping[str, Bytes]
    workspace: Bytes
    routed: Mapping[Span, Bytes]
    routed_scratch: Mapping[str, Bytes]
    ring: Mapping[str, Bytes]
    host: Mapping[Span, Bytes]


class _Recorded(NamedTuple):
    """A tape whose micro-batch size is open, with what is asked of it again and again."""

    tape: Tape
    params: tuple[Param, ...]
    saying: Saying
    words: set[str]
    sites: list[Site]


class _Told(NamedTuple):
    """A tape at one micro-batch size. `sizes` known so far: bytes, and those of a place in the arena."""

    recorded: _Recorded
    shapes: Sized
    sizes: dict[Spec, tuple[Bytes, Bytes]]


@dataclass(slots=True)
class Recorder:
    """Records pieces of one model at one sequence length and precision.

    Layouts that differ in what they remake or defer share a tape: it is lowered for each of them. Those that differ in
    the micro-batch's size share it too, with other shapes.
    """

    model: ModelSpec
    sequence_length: int
    precision: Policy
    tapes: dict[tuple[object, ...], _Recorded] = field(default_factory=dict[tuple[object, ...], "_Recorded"])
    told: dict[tuple[object, ...], _Told] = field(default_factory=dict[tuple[object, ...], "_Told"])
    outlines: dict[tuple[object, ...], Outline] = field(default_factory=dict[tuple[object, ...], Outline])
    workspaces: dict[tuple[Site, str], Bytes] = field(default_factory=dict[tuple[Site, str], Bytes])  # of a call
    linears: Linears = field(init=False)
    names: Sequence[str] = field(init=False)  # of the kind of each layer

    def __post_init__(self) -> None:
        self.linears = self.precision.linears(self.model.layers, self.model.predict_ahead)
        self.names = [f"as layer {first}" for first in first_like(self.model, self.precision)]

    @property
    def widths(self) -> Widths:
        return self.precision.widths

    def kinds(self, layers: range, layout: Layout) -> tuple[tuple[Kind, int], ...]:
        """The kinds of a stage's layers in order, runs of the same counted."""
        runs: list[tuple[Kind, int]] = []
        for place, i in enumerate(layers):
            kind = Kind(self.names[i], layout.like(place))
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return tuple(runs)

    def sight_of(self, kind: Kind, layout: Layout, seen: Sight) -> Sight:
        """What a piece sees of `seen`, all that a layout shows. A layer sees its own edit. At the ends there is no
        attention, and no layer to remake as a whole, unless the head predicts further ahead, with blocks of its own."""
        lay = layout
        if kind not in ENDS and not lay.uniform:
            return (*tape_sight(lay), *lay.edit(kind.place), lay.schedule == "zb_h1")
        if kind not in ENDS or (kind == HEAD and self.model.predict_ahead):
            return seen
        remade = tuple(word for word in lay.remake if word != "*")
        loss = (lay.loss, lay.loss_chunk) if kind == HEAD else ()
        own = (0, tokens) if (tokens := self._flat(kind, lay)) else (lay.cp, lay.micro_batch_size)
        return (lay.tp, *own, remade, lay.schedule == "zb_h1", *loss)

    def record(self, kind: Kind, layout: Layout) -> Piece:
        """A piece as a layout shows it."""
        told = self._told(kind, layout)
        return self._measure(self._outline(told.recorded, kind, layout), told, layout)

    def _outline(self, recorded: _Recorded, kind: Kind, layout: Layout) -> Outline:
        split, (remake, offload) = layout.schedule == "zb_h1", layout.edit(kind.place)
        edit = Edit(
            tuple([word for word in remake if word in recorded.words]),
            tuple([word for word in offload if word in recorded.words or word == ANCHORS]),
        )
        key = (recorded.saying, edit, split)
        if key not in self.outlines:
            self.outlines[key] = Outline.of(recorded.tape, edit, split=split)
        return self.outlines[key]

    def growth(self, kind: Kind, layout: Layout) -> tuple[Mapping[Span, Bytes], Mapping[Span, Bytes]]:
        """Bytes that a layer keeps for each sequence of a micro-batch at least, by span, what routing sizes left out;
        and those of its input, which another layer makes."""
        recorded = self._recorded(kind, replace(layout, micro_batch_size=OPEN))
        outline, grown = self._outline(recorded, kind, layout), Counter[Span]()
        tape, chunk = recorded.tape, outline.chunk
        exit_ = None if tape.exit is None else tape.specs[tape.exit]
        open_ = Sized(tape.specs, {}, exit_, recorded.sites)
        specs = outline.specs(open_, [*recorded.sites, *outline.copied(open_)])
        ends = (chunk.entry, chunk.exit, chunk.exit_gradient, chunk.entry_gradient)
        for r, life in outline.lives.items():
            if not life.scratch and r not in ends and not specs[r].pinned:
                grown[life.span] += aligned(specs[r], self.widths) // OPEN
        handed, r = dict[Span, Bytes](), chunk.entry
        if r is not None and r in outline.lives and outline.lives[r].dies[0] != "Fwd" and not specs[r].pinned:
            handed["Fwd", outline.lives[r].dies[0]] = aligned(specs[r], self.widths) // OPEN
        return +grown, handed

    def tape(self, kind: Kind, layout: Layout) -> Tape:
        """What a layout says of a piece."""
        return self._say(kind, layout).tape

    def _told(self, kind: Kind, layout: Layout) -> _Told:
        """The tape of a piece, at the layout's micro-batch size."""
        key = self._tape_key(kind, layout)
        if key not in self.told:
            chunked = kind == HEAD and layout.loss == "chunked"  # the micro-batch's size decides how many chunks
            recorded = self._recorded(kind, layout if chunked else replace(layout, micro_batch_size=OPEN))
            self.told[key] = _Told(recorded, sized(recorded.tape, recorded.sites, layout.micro_batch_size), {})
        return self.told[key]

    def _recorded(self, kind: Kind, layout: Layout) -> _Recorded:
        key = self._tape_key(kind, layout)
        if key not in self.tapes:
            do = self._say(kind, layout)
            words = {op.site.word for op in do.tape.ops} | {"*"}
            self.tapes[key] = _Recorded(do.tape, tuple(do.params.values()), saying(do.tape), words, sites_of(do.tape))
        return self.tapes[key]

    def _tape_key(self, kind: Kind, layout: Layout) -> tuple[object, ...]:
        if tokens := self._flat(kind, layout):
            return (kind.name, layout.tp, tokens, layout.loss_chunk)
        return (kind.name, *tape_sight(layout))

    def _flat(self, kind: Kind, layout: Layout) -> int:
        """Tokens of a rank, where they are all that a head sees: in chunks of whole rows of a micro-batch, it makes of
        one long sequence what it makes of several. 0 where it sees more."""
        lay, m = layout, self.model
        if kind != HEAD or lay.loss != "chunked" or m.predict_ahead:
            return 0
        chunk = lay.loss_chunk or chunk_tokens(m.vocab_size // lay.tp)
        return 0 if chunk % lay.micro_batch_size else self.sequence_length // lay.cp * lay.micro_batch_size

    def _say(self, kind: Kind, layout: Layout) -> Do:
        alone, length = replace(layout, pp=1, vpp=1, schedule="1f1b"), self.sequence_length
        if tokens := self._flat(kind, layout):
            alone, length = replace(alone, dp=1, cp=1, ep=1, micro_batch_size=1), tokens
        do = Do(Mesh(alone), self.linears, trains=True)
        layers = () if kind in ENDS else (self.names.index(kind.name),)
        part(do, self.model, layers, length, first=kind == EMBEDDING, last=kind == HEAD)
        return do

    def _measure(self, outline: Outline, told: _Told, layout: Layout) -> Piece:
        load, widths = Balanced.of(self.model, layout, self.sequence_length), self.widths
        sites = [*told.shapes.sites, *outline.copied(told.shapes)] if outline.copies else told.shapes.sites
        chunk, alive, specs = outline.chunk, outline.lives, outline.specs(told.shapes, sites)
        for spec in {*specs.values()} - told.sizes.keys():
            told.sizes[spec] = bytes_of(spec, widths, load), aligned(spec, widths)
        every = {r: told.sizes[spec] for r, spec in specs.items()}
        sizes = {r: n for r in alive if not specs[r].pinned and (n := every[r][1])}
        found = lay_out(chunk.actions, alive, sizes, chunk.turns)
        ends = (chunk.entry, chunk.exit, chunk.exit_gradient, chunk.entry_gradient)
        slots, routed, scratch = dict(found.slots), Counter[Span](), list[tuple[Life, Bytes]]()
        crossing: dict[str, list[tuple[tuple[int, int], tuple[int, int], Bytes]]] = {}
        for r, life in alive.items():
            (name, run, _), (last, last_run, _) = life
            if r in sizes:
                if name == last and run != last_run and r not in chunk.turns:
                    crossing.setdefault(name, []).append((life.born[1:], life.dies[1:], sizes[r]))
            elif name == last:
                scratch.append((life, every[r][0]))
            else:
                routed[life.span] += every[r][0]
        host = Counter[Span]()
        for r in alive if outline.copies else ():
            if specs[r].pinned:
                host[alive[r].span] += every[r][1]
        for r in {r for r in ends if r is not None}:
            slots[alive[r].span] -= sizes.get(r, 0)
        return Piece(
            outline=outline, sites=sites, bytes={r: n for r, (n, _) in every.items()},
            params=told.recorded.params, inputs=told.shapes.inputs,
            remembered=sum(map(remembered, told.shapes.sites)) if self.precision.fp8 else 0,
            slots={span: n for span, n in slots.items() if n},
            borders=tuple(None if r is None else alive[r] for r in ends),  # type: ignore[arg-type]
            stream=next((sizes[r] for r in ends if r is not None), 0),
            crossing={name: tuple(c) for name, c in crossing.items()},
            scratch={name: s.layer for name, s in found.scratch.items()},
            workspace=self._workspace(outline, told, layout, load),
            routed=+routed, routed_scratch=_most_at_once(scratch),
            ring={name: s.ring for name, s in found.scratch.items() if s.ring}, host=host,
        )  # fmt: skip

    def _workspace(self, outline: Outline, told: _Told, layout: Layout, load: Load) -> Bytes:
        """The largest of a body."""
        most, known = 0, self.workspaces
        for place, phase in outline.jobs:
            if phase in ("start", "finish"):
                continue
            site = told.shapes.sites[place]
            if (site, phase) not in known:
                body = body_of(site, layout)
                known[site, phase] = body.workspace(phase, shapes(site, load), site.weights, site.attrs, self.widths)
            most = max(most, known[site, phase])
        return most

    def work(self, piece: Piece, layout: Layout) -> tuple[Counter[str], Counter[Wire]]:
        """FLOPs by phase, and bytes on wires."""
        load, flops, wires = Balanced.of(self.model, layout, self.sequence_length), Counter[str](), Counter[Wire]()
        mesh = Mesh(layout)
        for job, _, _ in chain.from_iterable(piece.outline.calls.values()):
            place, phase = piece.outline.jobs[job]
            site = piece.sites[place]
            if phase == "start" and site.word in COPIES:
                continue
            if phase == "start":
                spec = counted(site.word, site.ins[0], site.outs[0])
                wires[site.word, str(site.attrs["axis"])] += bytes_of(spec, self.widths, load)
            elif phase != "finish":
                body = body_of(site, layout)
                about = (phase, shapes(site, load), site.weights, site.attrs)
                flops[phase] += body.flops(*about)
                axis, n = body.agreed(*about)
                if n and mesh.size(axis) > 1:
                    wires["all_reduce", axis] += n * FLOAT
        return +flops, +wires


def waiting(piece: Piece) -> frozenset[str]:
    """The parameters whose gradients may wait."""
    return frozenset(n for site in piece.sites if site.params and BODIES[site.word].deferrable for n in site.params)


def read_by(piece: Piece) -> Mapping[str, frozenset[str]]:
    """The parameters that each action reads."""
    found = dict[str, frozenset[str]]()
    for action, calls in piece.outline.calls.items():
        jobs = (piece.outline.jobs[job] for job in {job for job, _, _ in calls})
        found[action] = frozenset(
            n for place, phase in jobs if phase in READS for n in piece.sites[place].params
        )  # fmt: skip
    return found


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


def shapes(site: Site, load: Load) -> list[tuple[int, ...]]:
    """The shapes that a site is about, as numbers."""
    return [tuple([d if isinstance(d, int) else load.received(d.layer, 0) for d in s.shape]) for s in site.ins]


def bytes_of(spec: Spec, widths: Widths, load: Load) -> Bytes:
    """Bytes of a register on the device."""
    if spec.pinned:
        return 0
    return prod([d if isinstance(d, int) else load.received(d.layer, 0) for d in spec.shape]) * widths[spec.role]
