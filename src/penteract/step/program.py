"""One rank's training step, compiled: chunks, actions, buckets, and the events of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby

from penteract.config.layout import Edit, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.policy import Policy, check_layout, policy
from penteract.config.recompute import WHOLE
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.model.decoder import owning_pp_ranks, record, shared
from penteract.model.moe import over_sequence
from penteract.model.precision_patterns import check_modules
from penteract.ops.declarations import OPS
from penteract.ops.declarations.quantised.fp8 import (
    check_sizes,
    fp8_state_bytes,
    has_delayed_scales,
    knows_weights,
    reads_quantised_weight,
)
from penteract.ops.do import Do, Redistribution
from penteract.ops.fuse import STANDS_FOR
from penteract.ops.lower import ONCE, Chunk, Instruction, lower
from penteract.ops.offload import LAYER_INPUTS
from penteract.ops.params import OwningPpRanks, Param
from penteract.ops.spec import Widths
from penteract.ops.tape import OpCall, Site
from penteract.parallel import context, expert, tensor
from penteract.parallel.bucket_plans import FsdpUnit
from penteract.parallel.data import Bucket, buckets
from penteract.parallel.pipeline import stage_layers
from penteract.schedule.actions import ActionList, Compute, ComputeList, Overlapped, P2PBatch
from penteract.schedule.registry import ScheduleName, generate, schedule_of
from penteract.schedule.transfers import with_transfers
from penteract.step.all_reduces import losses, means
from penteract.step.events import At, Events, events

# Those with a result, which can be recomputed.
REDISTRIBUTIONS: tuple[Redistribution, ...] = (
    tensor.tp_all_gather, tensor.tp_reduce_scatter, tensor.cross_entropy(0.0),
    context.cp_all_gather, context.ring(), context.to_heads, context.to_tokens,
    expert.counts, expert.dispatch, expert.combine, expert.ep_all_gather, expert.ep_reduce_scatter, over_sequence,
)  # fmt: skip
# Ops that only redistributions call: these are recomputed as a whole.
INSIDE = frozenset({
    "pack_heads", "unpack_heads", "merge_attention", "sort_chunks", "sort_blocks", "row_max", "exp_sum",
    "negative_log_likelihood", "cross_entropy_gradient", "logits", "logits_gradient", "loss_and_gradient", "rows",
    "join_rows", "sum_shares",
})  # fmt: skip
BufferKey = tuple[int, int]  # (chunk, micro-batch): the activation buffer of one pass


@dataclass(frozen=True)
class Program:
    """All that rank `rank` does in a step.

    `events[(action, position)]`: bucket events before and after an instruction; those after the last action are at
    (number of actions, 0).
    """

    model: ModelSpec
    mesh: Mesh
    rank: int
    sequence_length: int
    precision: Policy
    chunks: tuple[Chunk, ...]
    params: tuple[Param, ...]  # of this rank
    everything: tuple[Param, ...]  # of all stages
    owning_pp_ranks: OwningPpRanks
    buckets: tuple[Bucket, ...]
    actions: tuple[Compute | Overlapped | P2PBatch, ...]
    events: Events

    @property
    def layout(self) -> Layout:
        """The layout of its mesh."""
        return self.mesh.layout

    @property
    def widths(self) -> Widths:
        """Bytes of an element by role, by its precision policy."""
        return self.precision.widths

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the loss terms, the same on every rank."""
        return losses(self.model)

    @property
    def means(self) -> tuple[str, ...]:
        """The loss terms that are means over targets."""
        return means(self.model)

    @property
    def balanced(self) -> tuple[str, ...]:
        """Routers of this rank that are balanced by a bias."""
        sites = (op.site for c in self.chunks for op in c.tape.ops if op.site.op_name == "tokens_per_expert")
        return tuple(str(s.attrs["name"]) for s in sites)

    @property
    def fp8_sites(self) -> tuple[Site, ...]:
        """Linear layers of this rank, and casts of what they read, with FP8 state besides parameters: delayed scales,
        scales of gathered weights, largest values of weights, or places for those of casts."""
        return self._fp8_sites

    @cached_property
    def _fp8_sites(self) -> tuple[Site, ...]:  # kept: each step asks
        return tuple(op.site for c in self.chunks for op in c.tape.ops if fp8_state_bytes(op.site))

    @property
    def delayed_scaling(self) -> tuple[Site, ...]:
        """Linear layers of this rank whose scales come from past steps (delayed scaling)."""
        return tuple(site for site in self.fp8_sites if has_delayed_scales(site))

    @property
    def quantised_weights(self) -> tuple[Site, ...]:
        """Linear layers of this rank whose weights are gathered in FP8."""
        return tuple(site for site in self.fp8_sites if reads_quantised_weight(site))

    @property
    def known_weights(self) -> tuple[Site, ...]:
        """Linear layers of this rank whose weights' largest values the update finds."""
        return tuple(site for site in self.fp8_sites if knows_weights(site))

    def instructions(self, action: Compute | Overlapped) -> Iterator[tuple[BufferKey, Instruction]]:
        """An action's instructions in order; those of two overlapped passes alternate."""
        match action:
            case Compute():
                buffer = (action.chunk, action.micro)
                return ((buffer, i) for i in self.chunks[action.chunk].actions[action.kind])
            case Overlapped():
                return _take_turns(self.instructions(action.backward), self.instructions(action.forward))


def _take_turns(*walks: Iterator[tuple[BufferKey, Instruction]]) -> Iterator[tuple[BufferKey, Instruction]]:
    left = list(walks)
    while left:
        for walk in list(left):
            if (item := next(walk, None)) is None:
                left.remove(walk)
            else:
                yield item


def compile_run(run: RunSpec, rank: int = 0, *, training: bool = True) -> Program:
    """The step of a run, as `compile_step` has it."""
    return compile_step(
        run.model, run.layout, run.sequence_length, rank=rank, precision=run.precision.policy,
        optimizer_kinds=run.optimizer.optimizer_kinds, training=training,
    )  # fmt: skip


def compile_step(  # noqa: PLR0913 (a step depends on many choices)
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    *,
    rank: int = 0,
    precision: str | Policy = "fp32",
    optimizer_kinds: OptimizerKinds = PLAIN,
    schedule: ScheduleName | None = None,
    training: bool = True,
) -> Program:
    """The step of `rank`. `training=False`: only forward passes, for validation and sampling; without MTP layers, and
    without blocks that copies may not fit, as nothing repeats a pass."""
    if layout.sends_blocks and not training:
        layout = layout.put(expert_rows="exact")
    mesh, precision = Mesh(layout), policy(precision)
    check_layout(precision, layout)
    whole, model = model, model if training or not model.mtp_layers else replace(model, mtp_layers=0)
    name = schedule or layout.schedule
    pp_rank = mesh.coordinates(rank)["pp"]
    check_modules(whole, precision)
    linear_layers = precision.linear_layers(model.layers, model.mtp_layers)
    recorded = [record(model, mesh, s, sequence_length, linear_layers) for s in range(layout.stages)]
    check_op_names(layout)
    cut = stage_layers(model.layers, layout)
    own, split = layout.placement.stages[pp_rank], schedule_of(name).split_backward
    chunks = tuple(
        lower(recorded[s].tape, layout.edit(-1), layer_edits(layout, cut[s]), split=split, training=training)
        for s in own
    )
    # Forward-only passes run on the state of training, so they have its buckets, including those they do not use.
    every, stages = precision.linear_layers(whole.layers, whole.mtp_layers), range(layout.stages)
    trained = recorded if whole is model else [record(whole, mesh, s, sequence_length, every) for s in stages]
    where = {n: home for (home, _), do in zip(layout.placement.locations, trained, strict=True) for n in do.params}
    all_owning_pp_ranks = owning_pp_ranks(whole, layout, where)
    units = units_of([trained[s] for s in own], whole)
    mine = tuple(p for unit in units for p in unit.params)[::-1]
    made = buckets(units, all_owning_pp_ranks, mesh, rank, precision, optimizer_kinds=optimizer_kinds)
    actions = tuple(_actions(layout, name, training)[pp_rank])
    everything = tuple({n: q for do in trained for n, q in do.params.items()}.values())
    program = Program(
        model, mesh, rank, sequence_length, precision, chunks, mine, everything, all_owning_pp_ranks, made, actions, {}
    )
    if training:
        check_sizes((op.site for c in chunks for op in c.tape.ops), chunks_per_sequence=2 if layout.cp > 1 else 1)
    return replace(program, events=events(made, layout, _numbered(program), (len(actions), 0)))


def layer_edits(layout: Layout, layers: range) -> dict[int, Edit]:
    """The edit of each layer of a stage."""
    return {layer: layout.edit(place) for place, layer in enumerate(layers)}


def check_op_names(layout: Layout) -> None:
    """Refuse names under which no op can be recomputed or offloaded."""
    op_names = ({*OPS, "*"} | {r.name for r in REDISTRIBUTIONS}) - {*STANDS_FOR} - INSIDE - ONCE
    for key, allowed, whole, named in (
        ("memory.recompute", op_names, WHOLE, layout.recompute),
        ("memory.recompute_else", op_names, WHOLE, layout.recompute_else),
        ("memory.offload", op_names | {LAYER_INPUTS}, {"none"}, layout.offload),
    ):
        for op_name in named:
            if op_name not in allowed:
                stands_for = STANDS_FOR.get(op_name)
                meant = {*allowed, *whole} if len(named) == 1 else allowed  # `full` is all that there is to say
                near = [stands_for] if stands_for else get_close_matches(op_name, sorted(meant), 3)
                what = "a fused op goes by the op it stands for" if stands_for else "no op of the program has this name"
                raise BadInput("OP", what, where=key, found=op_name[:60],
                               allowed=", ".join(near or (*sorted(whole), *sorted(allowed - {"*"}))),
                               fix=f"--{key} {near[0] if near else 'none'}")  # fmt: skip


def units_of(recorded: Sequence[Do], m: ModelSpec) -> tuple[FsdpUnit, ...]:
    """The FSDP units of a rank's chunks in forward order: what precedes the layers, each layer, what follows."""
    both, seen, out = shared(m), set[str](), list[FsdpUnit]()
    for do in recorded:
        for ops in _runs(do.tape.ops, m.layers):
            plain = (op.site for op in ops if op.program is None and op.site.params)
            late = {n for site in plain if OPS[site.op_name].declaration.deferrable for n in site.params}
            names = [n for n in dict.fromkeys(n for op in ops for n in op.site.params) if n not in seen]
            seen.update(names)
            quantised_weights = frozenset(op.site.params[0] for op in ops if reads_quantised_weight(op.site))
            known_weights = frozenset(op.site.params for op in ops if knows_weights(op.site))
            params = tuple(do.params[n] for n in names)
            out.append(FsdpUnit(params, frozenset(late), both, quantised_weights, known_weights))
    return tuple(out)


def _runs(ops: Sequence[OpCall], layers: int) -> Iterator[list[OpCall]]:
    """Ops before the first layer, of each layer, and after the last (MTP layers are after the last)."""
    inside = [0 <= op.site.layer < layers for op in ops]
    first, last = inside.index(True), len(inside) - inside[::-1].index(True)
    if first:
        yield list(ops[:first])
    for _, run in groupby(ops[first:last], key=lambda op: op.site.layer):
        yield list(run)
    if last < len(ops):
        yield list(ops[last:])


def _numbered(p: Program) -> Iterator[tuple[At, Instruction]]:
    """Every instruction of the step, with its position."""
    for a, action in enumerate(p.actions):
        if not isinstance(action, P2PBatch):
            for position, (_, instruction) in enumerate(p.instructions(action)):
                yield (a, position), instruction


def _actions(layout: Layout, name: ScheduleName, training: bool) -> list[ActionList]:
    n = layout.gradient_accumulation_steps
    lists: list[ComputeList] = generate(name, layout.pp, layout.vpp, n) if training else []
    if not training:
        lists = [[Compute("Fwd", m, c) for c in range(layout.vpp) for m in range(n)] for _ in range(layout.pp)]
    return with_transfers(lists, layout.placement)
