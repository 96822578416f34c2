"""One rank's training step, written out: chunks, actions, buckets, and when each bucket's last writer has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from penteract.errors import BadInput
from penteract.model.decoder import homes, record
from penteract.ops.bodies import BODIES
from penteract.ops.bodies.fp8 import check_sizes, remembered
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, Instruction, lower
from penteract.ops.params import Homes, Param
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket, buckets
from penteract.schedule.actions import ActionList, Compute, ComputeList, Exchange, Woven, stage_of
from penteract.schedule.generate import generate
from penteract.schedule.transfers import with_transfers
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.precision import Policy, policy
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
    precision: Policy
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
        return self.precision.widths

    @property
    def losses(self) -> tuple[str, ...]:
        """The loss's terms, the same on every rank."""
        moe = self.model.moe
        balance = ("balance",) if moe is not None and moe.balance == "loss" else ()
        return (*self.means, *(("z_loss",) if self.model.z_loss_coefficient else ()), *balance)

    @property
    def means(self) -> tuple[str, ...]:
        """Those of the loss's terms that are means over targets."""
        return ("cross_entropy", "predict_ahead") if self.model.predict_ahead else ("cross_entropy",)

    @property
    def balanced(self) -> tuple[str, ...]:
        """Routers of this rank whose choice a bias steers."""
        said = (op.site for c in self.chunks for op in c.tape.ops if op.site.word == "tally")
        return tuple(str(s.attrs["name"]) for s in said)

    @property
    def delayed(self) -> tuple[Site, ...]:
        """Linears of this rank whose scales are made of past steps."""
        return tuple(op.site for c in self.chunks for op in c.tape.ops if remembered(op.site))

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
    precision: str | Policy = "fp32",
    schedule: ScheduleName | None = None,
    training: bool = True,
) -> Program:
    """The step of `rank`. `training=False`: forward passes alone, for validation and sampling, of the next token."""
    mesh, precision = Mesh(layout), policy(precision)
    if not training:
        model = replace(model, predict_ahead=0)
    name = schedule or layout.schedule
    pp_rank = mesh.coordinates(rank)["pp"]
    said = [record(model, mesh, s, sequence_length, precision.fp8) for s in range(layout.stages)]
    _check_words(layout)
    lowered = {
        c: lower(said[stage_of(pp_rank, c, layout.pp)].tape, layout.remake, split=name == "zb_h1", training=training)
        for c in range(layout.vpp)
    }
    chunks = tuple(lowered[c] for c in range(layout.vpp))
    where = {n: s % layout.pp for s, do in enumerate(said) for n in do.params}
    all_homes = homes(model, layout, where)
    mine = _backward_order([said[stage_of(pp_rank, c, layout.pp)] for c in range(layout.vpp)])
    made = buckets(mine, all_homes, mesh, rank, precision)
    actions = tuple(_actions(layout, name, training)[pp_rank])
    everything = tuple({n: q for do in said for n, q in do.params.items()}.values())
    program = Program(
        model, mesh, rank, sequence_length, precision, chunks, mine, everything, all_homes, made, actions, {}
    )
    if training:
        check_sizes((op.site for c in chunks for op in c.tape.ops), pieces=2 if layout.cp > 1 else 1)
    return _with_reductions(program) if training else program


def _check_words(layout: Layout) -> None:
    """Words to remake exist."""
    known = {*BODIES, "*", *SEAMS}
    for word in layout.remake:
        if word not in known:
            near = get_close_matches(word, sorted(known), 3)
            raise BadInput("WORD", "no word of the program has this name", where="memory.recompute", found=word[:60],
                           allowed=", ".join(near or sorted(known - {"*"})),
                           fix=f"--memory.recompute {near[0] if near else 'none'}")  # fmt: skip


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
