"""The pieces that stages are made of: the embedding, one layer of each kind, the head. Each is recorded once for what
it sees, and every stage of every layout that shows it the same is a sum of them.

Recorded alone, a piece receives its input and hands on its result. In a stage its neighbours do that: the registers at
a border are then born in one piece and die in the next (`composed.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from penteract.ops.bodies.fp8 import is_coded
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
from penteract.step.places import Span, aligned
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
            lay.attention, lay.elementwise, lay.loss, lay.loss_chunk)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """What one pass of a micro-batch through a piece does on a rank. `holdings.py` tells what it takes.

    `shapes` of its tape; `sites`: those of the tape, then those of copies
    `sizes`  bytes of registers, and of their places in an arena, so far as they were asked for
    """

    outline: Outline
    shapes: Sized
    sites: Sequence[Site]
    params: tuple[Param, ...]
    sizes: dict[Spec, tuple[Bytes, Bytes]]

    @property
    def inputs(self) -> Mapping[str, Spec]:
        return self.shapes.inputs

    @cached_property
    def specs(self) -> Mapping[int, Spec]:
        """Of every register that lives."""
        return self.outline.specs(self.shapes, self.sites)


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
        outline = self._outline(told.recorded, kind, layout)
        sites = [*told.shapes.sites, *outline.copied(told.shapes)] if outline.copies else told.shapes.sites
        return Piece(outline, told.shapes, sites, told.recorded.params, told.sizes)

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


def coded(piece: Piece) -> frozenset[str]:
    """The parameters that are gathered as codes."""
    return frozenset(site.params[0] for site in piece.sites if is_coded(site))


def read_by(piece: Piece) -> Mapping[str, frozenset[str]]:
    """The parameters that each action reads."""
    found = dict[str, frozenset[str]]()
    for action, calls in piece.outline.calls.items():
        jobs = (piece.outline.jobs[job] for job in {job for job, _, _ in calls})
        found[action] = frozenset(
            n for place, phase in jobs if phase in READS for n in piece.sites[place].params
        )  # fmt: skip
    return found


def shapes(site: Site, load: Load) -> list[tuple[int, ...]]:
    """The shapes that a site is about, as numbers."""
    return [tuple([d if isinstance(d, int) else load.received(d.layer, 0) for d in s.shape]) for s in site.ins]


def bytes_of(spec: Spec, widths: Widths, load: Load) -> Bytes:
    """Bytes of a register on the device."""
    if spec.pinned:
        return 0
    return prod([d if isinstance(d, int) else load.received(d.layer, 0) for d in spec.shape]) * widths[spec.role]
