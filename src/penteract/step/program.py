"""One rank's training step, written out: chunks, actions, buckets, and when each bucket's last writer has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from penteract.errors import BadInput
from penteract.model.decoder import homes, record
from penteract.ops.bodies import BODIES
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, Instruction, lower
from penteract.ops.offload import ANCHORS
from penteract.ops.params import Homes, Param
from penteract.ops.spec import WIDTHS, Widths
from penteract.parallel.data import Bucket, buckets
from penteract.parallel.pipeline import stage_layers
from penteract.schedule.actions import ActionList, Compute, ComputeList, Exchange, Woven, stage_of
from penteract.schedule.generate import generate
from penteract.schedule.transfers import with_transfers
from penteract.spec.layout import Edit, Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.schedules import ScheduleName

SEAMS = (
    "enter",
    "leave",
    "gather",
    "ring",
    "to_heads",
    "to_tokens",
    "send",
    "back",
    "cross_entropy",
)  # that can be remade
Slot = tuple[int, int]  # (chunk, micro-batch): what one pass keeps lives in its slot


@dataclass(frozen=True, slots=True)
class Program:
    """All that rank `rank` does in a step.

    `reduce_after[(action, position)]`: buckets whose last gradient has then been written.
    """

    model: ModelSpec
    mesh: Mesh
    rank: int
    sequence_length: int
    precision: str
    chunks: tuple[Chunk, ...]
    params: tuple[Param, ...]  # of this rank
    everything: tuple[Param, ...]  # of all stages
    homes: Homes
    buckets: tuple[Bucket, ...]
    actions: tuple[Compute | Woven | Exchange, ...]
    reduce_after: Mapping[tuple[int, int], tuple[int, ...]]

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def widths(self) -> Widths:
        return WIDTHS[self.precision]

    @property
    def losses(self) -> tuple[str, ...]:
        """The loss's terms, the same on every rank."""
        moe = self.model.moe
        return (*self.means, "balance") if moe is not None and moe.balance == "loss" else self.means

    @property
    def means(self) -> tuple[str, ...]:
        """Those of the loss's terms that are means over targets."""
        return ("cross_entropy", "predict_ahead") if self.model.predict_ahead else ("cross_entropy",)

    @property
    def balanced(self) -> tuple[str, ...]:
        """Routers of this rank whose choice a bias steers."""
        said = (op.site for c in self.chunks for op in c.tape.ops if op.site.word == "tally")
        return tuple(str(s.attrs["name"]) for s in said)

    def instructions(self, action: Compute | Woven) -> Iterator[tuple[Slot, Instruction]]:
        """An action's instructions in order; two woven passes take turns."""
        match action:
            case Compute():
                slot = (action.chunk, action.micro)
                return ((slot, i) for i in self.chunks[action.chunk].actions[action.kind])
            case Woven():
                return _take_turns(self.instructions(action.backward), self.instructions(action.forward))


def _take_turns(*walks: Iterator[tuple[Slot, Instruction]]) -> Iterator[tuple[Slot, Instruction]]:
    left = list(walks)
    while left:
        for walk in list(left):
            if (item := next(walk, None)) is None:
                left.remove(walk)
            else:
                yield item


def compile_step(
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    *,
    rank: int = 0,
    precision: str = "fp32",
    schedule: ScheduleName | None = None,
    training: bool = True,
) -> Program:
    """The step of `rank`. `training=False`: forward passes alone, for validation and sampling, of the next token."""
    mesh = Mesh(layout)
    if not training:
        model = replace(model, predict_ahead=0)
    name = schedule or layout.schedule
    pp_rank = mesh.coordinates(rank)["pp"]
    said = [record(model, mesh, s, sequence_length) for s in range(layout.stages)]
    check_words(layout)
    cut = stage_layers(model.layers, layout.stages)
    own = [stage_of(pp_rank, c, layout.pp) for c in range(layout.vpp)]
    chunks = tuple(
        lower(said[s].tape, layout.edit(-1), layer_edits(layout, cut[s]), split=name == "zb_h1", training=training)
        for s in own
    )
    where = {n: s % layout.pp for s, do in enumerate(said) for n in do.params}
    all_homes = homes(model, layout, where)
    mine = _backward_order([said[s] for s in own])
    made = buckets(mine, all_homes, mesh, rank, WIDTHS[precision]["stat"])
    actions = tuple(_actions(layout, name, training)[pp_rank])
    everything = tuple({n: q for do in said for n, q in do.params.items()}.values())
    program = Program(
        model, mesh, rank, sequence_length, precision, chunks, mine, everything, all_homes, made, actions, {}
    )
    return _with_reductions(program) if training else program


def layer_edits(layout: Layout, layers: range) -> dict[int, Edit]:
    """The edit of each layer of a stage."""
    return {layer: layout.edit(place) for place, layer in enumerate(layers)}


def check_words(layout: Layout) -> None:
    """Words to remake and to offload exist."""
    words = {*BODIES, "*", *SEAMS}
    for key, known, named in (
        ("memory.recompute", words, layout.remake),
        ("memory.recompute_else", words, layout.remake_else),
        ("memory.offload", words | {ANCHORS}, layout.offload),
    ):
        for word in named:
            if word not in known:
                near = get_close_matches(word, sorted(known), 3)
                raise BadInput("WORD", "no word of the program has this name", where=key, found=word[:60],
                               allowed=", ".join(near or sorted(known - {"*"})),
                               fix=f"--{key} {near[0] if near else 'none'}")  # fmt: skip


def _backward_order(said: list[Do]) -> tuple[Param, ...]:
    """Parameters in about the order in which backward finishes their gradients."""
    forward = {n: p for do in said for n, p in do.params.items()}
    return tuple(reversed(forward.values()))


def _actions(layout: Layout, name: ScheduleName, training: bool) -> list[ActionList]:
    n = layout.gradient_accumulation_steps
    lists: list[ComputeList] = generate(name, layout.pp, layout.vpp, n) if training else []
    if not training:
        lists = [[Compute("Fwd", m, c) for c in range(layout.vpp) for m in range(n)] for _ in range(layout.pp)]
    return with_transfers(lists, layout.pp, layout.vpp)


def _with_reductions(p: Program) -> Program:
    """Find each bucket's last writer in the order of the walk."""
    bucket_of = {q.name: b for b, bucket in enumerate(p.buckets) for q in bucket.params}
    last: dict[int, tuple[int, int]] = {}
    for a, action in enumerate(p.actions):
        if isinstance(action, Exchange):
            continue
        for position, (_, instruction) in enumerate(p.instructions(action)):
            if instruction.call.phase == "weight_gradient":
                last |= {bucket_of[n]: (a, position) for n in instruction.call.site.params}
    after: dict[tuple[int, int], list[int]] = {}
    for b, at in last.items():
        if not p.buckets[b].across_stages:
            after.setdefault(at, []).append(b)
    reduce_after = {at: tuple(sorted(bs)) for at, bs in after.items()}
    return replace(p, reduce_after=reduce_after)
