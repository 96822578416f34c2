"""The layer programs that stages are made of: the embedding, one layer of each type, the head. Each is recorded once
for all layouts in which it is the same, and every stage is a sum of them. Here a "layer" may be the embedding or head.

A layer is recorded with a received input and a sent output. In a stage, its neighbours make and use these: the
registers at a border are born in one layer and die in the next (`stages.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from penteract.config.layout import Edit, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.module_patterns import LinearLayers
from penteract.config.precision.policy import Policy
from penteract.model.decoder import part
from penteract.model.precision_patterns import first_like
from penteract.ops.collectives import payload
from penteract.ops.declarations import OPS, declaration_of
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import knows_weights, reads_quantised_weight
from penteract.ops.do import Do
from penteract.ops.offload import LAYER_INPUTS, OFFLOAD_OPS
from penteract.ops.params import Param
from penteract.ops.spec import Received, Spec, Widths
from penteract.ops.tape import Site, Tape
from penteract.parallel.tensor import chunk_tokens
from penteract.readings.layers.expert_load import Balanced, Load
from penteract.readings.layers.outline import Outline, Signature, signature, sites_of
from penteract.readings.layers.reads import Memos, changed, tracked
from penteract.readings.layers.sized import OPEN, Sized, sized
from penteract.readings.layers.touches import NEVER, Touches
from penteract.step.events import READS
from penteract.step.offsets import Span, aligned
from penteract.units import Bytes

Wire = tuple[str, str]  # collective, axis
Sizes = dict[Spec, tuple[Bytes, Bytes]]


class LayerType(NamedTuple):
    """The embedding, the head, or a type of layer: named after the first layer like it, and with the first place in a
    stage that has the same recomputation and offload (-1: these do not matter)."""

    name: str
    place: int = -1


EMBEDDING, HEAD = EMBEDDING_AND_HEAD = (LayerType("embedding"), LayerType("head"))


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """One pass of a micro-batch through the embedding, a layer or the head on a rank. `layer_memory.py` gives its
    memory. Layouts in which it is the same share one object, so caches can use it as their key.

    `shapes` of its tape; `sites`: those of the tape, then those of copies
    `sizes`  a cache: bytes of registers, and of their aligned size in an arena, by load
    `touched` a cache of `touches`
    """

    outline: Outline
    shapes: Sized
    sites: Sequence[Site]
    sizes: dict[Load, Sizes]
    touched: dict[str, Touches] = field(default_factory=dict[str, Touches])

    @property
    def inputs(self) -> Mapping[str, Spec]:
        """The input data that it reads, by name."""
        return self.shapes.inputs

    @cached_property
    def specs(self) -> Mapping[int, Spec]:
        """The spec of every live register."""
        return self.outline.specs(self.shapes, self.sites)

    @cached_property
    def read_by(self) -> Mapping[str, frozenset[str]]:
        """The parameters that each action reads."""
        found: dict[str, frozenset[str]] = {}
        for action, calls in self.outline.calls.items():
            jobs = (self.outline.jobs[job] for job in {job for job, _, _ in calls})
            found[action] = frozenset(n for at, phase in jobs if phase in READS for n in self.sites[at].params)
        return found

    def touches(self, action: str) -> Touches:
        """Where an action reads parameters and writes their gradients."""
        if (found := self.touched.get(action)) is None:
            jobs = [self.outline.jobs[job] for job, _, _ in self.outline.calls.get(action, ())]
            found = self.touched[action] = Touches.of(jobs, self.sites)
        return found

    def reads_message(self, action: str) -> int:
        """Which call of an action is the first to read the value or the gradient from another stage, where this layer
        is the first of its chunk to compute; `NEVER`: none."""
        outline = self.outline
        register = outline.chunk.entry if action == "Fwd" else outline.chunk.exit_gradient
        if register is None or action == "Wgt":
            return NEVER
        reads = (pos for pos, (_, ins, _) in enumerate(outline.calls.get(action, ())) if register in ins)
        return next(reads, NEVER)


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Bytes that a layer keeps per sequence, by span: its own registers, and its input (`entry`)."""

    own: Mapping[Span, Bytes]
    entry: Mapping[Span, Bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The parameters of a layer, in the order of their first use; those whose gradients may be delayed; those that are
    gathered quantised; by product, those whose largest values are known. Equal ones are one object."""

    params: tuple[Param, ...]
    delayed_weight_gradients: frozenset[str]
    quantised_weights: frozenset[str]
    known_weights: frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A tape whose micro-batch size is open, with values derived from it."""

    tape: Tape
    uses: Uses
    signature: Signature
    op_names: set[str]
    sites: list[Site]


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A tape at one micro-batch size. `sizes` as in `LayerProgram`."""

    recorded: _Recorded
    shapes: Sized
    sizes: dict[Load, Sizes]


@dataclass(slots=True)
class Recorder:
    """Records the layers of one model at one sequence length and precision.

    Tapes are cached by the fields of a layout that recording them read (`reads.py`). Beyond that the tape decides:
    tapes with equal signatures share an outline, and the same shapes with the same outline are one `LayerProgram`.
    """

    model: ModelSpec
    sequence_length: int
    precision: Policy
    memos: Memos = field(default_factory=Memos)
    outlines: dict[tuple[Signature, Edit, bool], Outline] = field(
        default_factory=dict[tuple[Signature, Edit, bool], Outline]
    )
    layer_programs: dict[tuple[_Recording, Outline], LayerProgram] = field(
        default_factory=dict[tuple["_Recording", Outline], LayerProgram]
    )
    used: dict[tuple[object, ...], Uses] = field(default_factory=dict[tuple[object, ...], "Uses"])
    widths: Widths = field(init=False)
    linear_layers: LinearLayers = field(init=False)
    names: Sequence[str] = field(init=False)  # of the type of each layer

    def __post_init__(self) -> None:
        """Take widths, FP8 linear layers and the type of each layer from the policy."""
        self.widths = self.precision.widths
        self.linear_layers = self.precision.linear_layers(self.model.layers, self.model.mtp_layers)
        self.names = [f"as layer {first}" for first in first_like(self.model, self.precision)]

    def kinds(self, layers: range, layout: Layout) -> tuple[tuple[LayerType, int], ...]:
        """The types of a stage's layers in order, each with how many in a row have it."""
        runs: list[tuple[LayerType, int]] = []
        for place, i in enumerate(layers):
            kind = LayerType(self.names[i], layout.like(place))
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return tuple(runs)

    @tracked
    def layer_program(self, layout: Layout, kind: LayerType) -> LayerProgram:
        """The program of this type of layer in a layout."""
        recording = self._recording(layout, kind.name)
        outline = self._outline(recording.recorded, layout, kind)
        if (recording, outline) not in self.layer_programs:
            shapes = recording.shapes
            sites = [*shapes.sites, *outline.copied(shapes)] if outline.copies else shapes.sites
            self.layer_programs[recording, outline] = LayerProgram(outline, shapes, sites, recording.sizes)
        return self.layer_programs[recording, outline]

    def _outline(self, recorded: _Recorded, layout: Layout, kind: LayerType) -> Outline:
        split, (recompute, offload) = layout.split_backward, layout.edit(kind.place)
        edit = Edit(
            tuple([op_name for op_name in recompute if op_name in recorded.op_names]),
            tuple([op_name for op_name in offload if op_name in recorded.op_names or op_name == LAYER_INPUTS]),
        )
        key = (recorded.signature, edit, split)
        if key not in self.outlines:
            self.outlines[key] = Outline.of(recorded.tape, edit, split=split)
        return self.outlines[key]

    @tracked
    def uses(self, layout: Layout, kind: LayerType) -> Uses:
        """The parameters of a layer. They do not depend on the number of tokens, so a short tape is recorded."""
        few = changed(layout, micro_batch_size=1, loss_chunk=self.sequence_length)
        found = self._tape_of(few, kind.name).uses
        key = (found.params, found.delayed_weight_gradients, found.quantised_weights, found.known_weights)
        return self.used.setdefault(key, found)

    @tracked
    def growth(self, layout: Layout, kind: LayerType) -> Growth:
        """A lower bound of the bytes that a layer keeps per sequence of a micro-batch, by span, without registers of
        routed size; and those of its input, which another layer makes."""
        recorded = self._recorded(changed(layout, micro_batch_size=OPEN), kind.name)
        outline, grown = self._outline(recorded, layout, kind), Counter[Span]()
        tape, chunk = recorded.tape, outline.chunk
        exit_ = None if tape.exit is None else tape.specs[tape.exit]
        open_ = Sized(tape.specs, {}, exit_, recorded.sites)
        specs = outline.specs(open_, [*recorded.sites, *outline.copied(open_)])
        ends = (chunk.entry, chunk.exit, chunk.exit_gradient, chunk.entry_gradient)
        for r, life in outline.lives.items():
            if not life.temporary and r not in ends and not specs[r].pinned:
                grown[life.span] += aligned(specs[r], self.widths) // OPEN
        entry, r = dict[Span, Bytes](), chunk.entry
        if r is not None and r in outline.lives and outline.lives[r].dies[0] != "Fwd" and not specs[r].pinned:
            entry["Fwd", outline.lives[r].dies[0]] = aligned(specs[r], self.widths) // OPEN
        return Growth(+grown, entry)

    def tape(self, layout: Layout, kind: LayerType) -> Tape:
        """The tape of a layer in a layout."""
        if tokens := self._flat(layout, kind.name):
            return self._record_flat(layout, tokens).tape
        return self._record(layout, kind.name, self.sequence_length).tape

    @tracked
    def _recording(self, layout: Layout, name: str) -> _Recording:
        """The tape of a layer, at the layout's micro-batch size."""
        if tokens := self._flat(layout, name):
            return self._flat_recording(layout, tokens)
        recorded = self._tape_of(layout, name)
        return _Recording(recorded, sized(recorded.tape, recorded.sites, layout.micro_batch_size), {})

    def _tape_of(self, layout: Layout, name: str) -> _Recorded:
        if tokens := self._flat(layout, name):
            return self._flat_recording(layout, tokens).recorded
        chunked = name == HEAD.name and layout.loss == "chunked"  # the micro-batch size decides how many chunks
        return self._recorded(layout if chunked else changed(layout, micro_batch_size=OPEN), name)

    @tracked
    def _recorded(self, layout: Layout, name: str) -> _Recorded:
        return _recorded(self._record(layout, name, self.sequence_length))

    def _flat(self, layout: Layout, name: str) -> int:
        """The tokens of a rank, if the head's tape depends on them alone; else 0. It does if its chunks are whole rows
        of a micro-batch: then one long sequence gives the same tape as several short ones."""
        if name != HEAD.name or self.model.mtp_layers or layout.loss != "chunked":
            return 0
        lay, chunk = layout, layout.loss_chunk or chunk_tokens(self.model.vocab_size // layout.tp, layout)
        return 0 if chunk % lay.micro_batch_size else self.sequence_length // lay.cp * lay.micro_batch_size

    @tracked
    def _flat_recording(self, layout: Layout, tokens: int) -> _Recording:
        """The head for one sequence of `tokens` tokens."""
        recorded = _recorded(self._record_flat(layout, tokens))
        return _Recording(recorded, sized(recorded.tape, recorded.sites, 1), {})

    def _record_flat(self, layout: Layout, tokens: int) -> Do:
        return self._record(changed(layout, cp=1, micro_batch_size=1), HEAD.name, tokens)

    def _record(self, layout: Layout, name: str, length: int) -> Do:
        do = Do(Mesh(layout), self.linear_layers, trains=True)
        first, last = name == EMBEDDING.name, name == HEAD.name
        part(do, self.model, () if first or last else (self.names.index(name),), length, first=first, last=last)
        return do

    def work(self, layer: LayerProgram, layout: Layout) -> tuple[Counter[str], Counter[Wire]]:
        """FLOPs by phase, and bytes of collectives."""
        load, flops, wires = Balanced.of(self.model, layout, self.sequence_length), Counter[str](), Counter[Wire]()
        mesh = Mesh(layout)
        for job, _, _ in chain.from_iterable(layer.outline.calls.values()):
            place, phase = layer.outline.jobs[job]
            site = layer.sites[place]
            if phase == "start" and site.op_name in OFFLOAD_OPS:
                continue
            if phase == "start":
                spec = payload(site.op_name, site.ins[0], site.outs[0])
                wires[site.op_name, str(site.attrs["axis"])] += bytes_of(spec, self.widths, load)
            elif phase != "finish":
                declaration = declaration_of(site, layout)
                about = (phase, shapes(site, load), site.weights, site.attrs)
                flops[phase] += declaration.flops(*about)
                axis, n = declaration.all_reduced_max(*about)
                if n and mesh.size(axis) > 1:
                    wires["all_reduce", axis] += n * FLOAT
        return +flops, +wires


def _recorded(do: Do) -> _Recorded:
    sites = sites_of(do.tape)
    op_names = {one.name for op in do.tape.ops for one in (op, op.again) if one is not None}
    if any(op.site.layer >= 0 for op in do.tape.ops):  # without a layer, "*" (a whole layer) recomputes nothing
        op_names.add("*")
    delayed_weight_gradients = frozenset(
        n for site in sites if site.params and OPS[site.op_name].declaration.deferrable for n in site.params
    )
    quantised_weights = frozenset(site.params[0] for site in sites if reads_quantised_weight(site))
    known_weights = frozenset(site.params for site in sites if knows_weights(site))
    return _Recorded(
        do.tape,
        Uses(tuple(do.params.values()), delayed_weight_gradients, quantised_weights, known_weights),
        signature(do.tape),
        op_names,
        sites,
    )


def shapes(site: Site, load: Load, *, room: bool = False) -> list[tuple[int, ...]]:
    """The input shapes of a site, as numbers: of the rows that there are, or that its registers have room for."""
    return [tuple([d if isinstance(d, int) else _number(d, load, room=room) for d in s.shape]) for s in site.ins]


def attributes(site: Site, load: Load, *, room: bool = False) -> Mapping[str, Any]:
    """The attributes of a site, with sizes that routing gives as numbers, or the room that there is for them."""
    if not any(isinstance(value, Received) for value in site.attrs.values()):
        return site.attrs
    return {name: _number(v, load, room=room) if isinstance(v, Received) else v for name, v in site.attrs.items()}


def _number(rows: Received, load: Load, *, room: bool) -> int:
    return (room and rows.at_most) or load.received(rows.layer, 0)


def bytes_of(spec: Spec, widths: Widths, load: Load, *, room: bool = False) -> Bytes:
    """Bytes of a value on the device: of the rows that there are, or that there is room for."""
    if spec.pinned:
        return 0
    return prod([d if isinstance(d, int) else _number(d, load, room=room) for d in spec.shape]) * widths[spec.role]
