"""Run one layout on the pool and compare each rank with the oracle (values) and with the price (bytes, FLOPs)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist

import oracle
from observe import Watched, Wires
from penteract.config.layout import Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.policy import Policy
from penteract.engine.comm.direct.host_peers import HostPeers
from penteract.engine.comm.distributed import Gloo
from penteract.engine.comm.groups import ProcessGroups, Round, direct_rounds, needed
from penteract.engine.executor.allocator import Arena, Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_counts
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import kernels
from penteract.engine.state.state import ParameterPart, allocate
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import Price, price
from penteract.schedule.registry import ScheduleName
from penteract.step.arena import plan_arena
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from samples import sample, stacked
from tolerances import PARITY, ZERO

CPU = torch.device("cpu")
TURNS = 500  # of at least a millisecond, in which the transport's threads get to drop their buffers


@dataclass(frozen=True)
class Case:
    """One layout of one model. Its text is Python that makes it again.

    `schedule`: one that a layout cannot name ("overlapped").
    """

    model: ModelSpec
    layout: Layout
    sequence_length: int = 16
    schedule: ScheduleName | None = None
    precision: str | Policy = "fp64"
    optimizer_kinds: OptimizerKinds = PLAIN

    def __repr__(self) -> str:
        return _said(self)

    def compile(self, rank: int) -> Program:
        return compile_step(
            self.model, self.layout, self.sequence_length, rank=rank, precision=self.precision,
            optimizer_kinds=self.optimizer_kinds,
            schedule=self.schedule,
        )  # fmt: skip


def _said(value: Any) -> str:
    """A frozen value without what it has by default."""
    if not isinstance(value, (Case, Layout, ModelSpec, MoESpec, LatentSpec, RopeScaling)):
        return repr(value)
    said = ((f.name, getattr(value, f.name), f.default) for f in fields(value))
    return f"{type(value).__name__}({', '.join(f'{n}={_said(v)}' for n, v, default in said if v != default)})"


@dataclass
class Verdict:
    """What one rank found: worst relative errors of gradients, and of losses and the norm, and where price and run
    differ."""

    gradient: float = 0.0
    worst: str = ""
    loss: float = 0.0
    differences: list[tuple[str, str]] = field(default_factory=list)  # (wires | FLOPs | kept | routing | arena, what)
    received: int = 0

    @property
    def red(self) -> set[str]:
        """Which comparisons fail."""
        values = {"values"} if max(self.gradient, self.loss) > PARITY else set[str]()
        return values | {kind for kind, _ in self.differences}

    def __str__(self) -> str:
        differences = "".join(f"\n  {kind}: {what}" for kind, what in self.differences[:6])
        return f"gradient {self.gradient:.1e} ({self.worst}), loss {self.loss:.1e}{differences}"


@dataclass
class Subject:
    """What a mutation may change before the step: the program that runs, its kernels, or (by a patch) any rule."""

    priced: Program
    program: Program
    kernels: dict[str, TorchKernel]
    patches: ExitStack


Mutation = Callable[[Subject], None]
Reference = tuple[dict[str, torch.Tensor], dict[str, float]]


def reference(rank: int, groups: ProcessGroups, case: Case) -> Reference:
    """The oracle's gradients and losses for the first batch, in float64."""
    lay = case.layout
    return made_once(rank, groups, lay, lambda: _reference(case.model, case.sequence_length, lay.global_batch_size))


def made_once(rank: int, groups: ProcessGroups, layout: Layout, make: Callable[[], Any]) -> Any:
    """What the last rank of a layout makes, for all of them."""
    everyone = tuple(range(layout.world))
    groups.make([Round((everyone,))])
    last = everyone[-1]
    box = [make() if rank == last else None]
    if last:
        dist.broadcast_object_list(box, src=last, group=groups[everyone])
    return box[0]


@lru_cache(maxsize=64)
def _reference(m: ModelSpec, sequence_length: int, batch: int) -> Reference:
    p = compile_step(m, Layout(), sequence_length, precision="fp64")
    state = allocate(p, CPU)
    initialise(p, state, 0)
    steer(state.biases)
    w = {n: t.clone().requires_grad_() for n, t in state.parameters.items()}
    samples = [sample(i, sequence_length, m.vocab_size) for i in range(batch)]
    scale = {"cross_entropy": 1 / sum(int((s.targets >= 0).sum()) for s in samples)}
    if m.moe:
        scale["balance"] = m.moe.balance_coefficient / batch
    terms = oracle.loss(m, w, stacked(samples), scale, state.biases)
    torch.stack(list(terms.values())).sum().backward()
    gradients = {n: t.grad for n, t in w.items() if t.grad is not None}
    return gradients, {name: term.item() for name, term in terms.items()}


def steer(biases: dict[str, torch.Tensor]) -> None:
    """Uneven routing: where a bias steers, expert 0 gets no token and the last one more than its share."""
    for b in biases.values():
        b[0], b[-1] = -10.0, 0.2


def run_case(rank: int, groups: ProcessGroups, case: Case, mutate: Mutation | None = None) -> Verdict:
    """One step of `case` on this rank."""
    p = case.compile(rank)
    groups.make(needed(p))
    with ExitStack() as patches:
        subject, placed = Subject(p, p, computed_by(p), patches), None
        if mutate is not None:
            mutate(subject)
        else:
            placed = _in_arena(p, groups)
        run, verdict = _step(subject, groups, placed.received if placed else {})
        if placed is not None:
            verdict.differences += _compare_arena(run, placed)
        losses = dict(zip(p.losses, run.totals[1:-1].tolist(), strict=True)) | {"norm": run.totals[0].item()}
        gradients = list(run.state.parameter_parts("gradient"))
    _compare_values(p, reference(rank, groups, case), gradients, losses, verdict)
    return verdict


def run_directly(rank: int, groups: ProcessGroups, case: Case) -> tuple[Verdict, int]:
    """The same step where ranks read each other's registers; how often they did."""
    p = case.compile(rank)
    groups.make(needed(p))
    run, plan = _prepare(p, groups, computed_by(p)), plan_arena(p)
    comm = Gloo(rank, groups)
    block = comm.share(plan.size, direct_rounds(p, p.layout.world), HostPeers())
    run.comm, run.memory = comm, Arena(plan, p.precision, CPU, block)
    walk(p, run, targets_counted=False)
    losses = dict(zip(p.losses, run.totals[1:-1].tolist(), strict=True)) | {"norm": run.totals[0].item()}
    verdict = Verdict()
    _compare_values(p, reference(rank, groups, case), list(run.state.parameter_parts("gradient")), losses, verdict)
    return verdict, sum(group.number for group in comm.direct.values())


def _step(
    subject: Subject, groups: ProcessGroups, load: Mapping[tuple[int, int], int] | None = None
) -> tuple[Executor, Verdict]:
    """Walk the step under observation; what is observed against its price. `load`: what an earlier walk received."""
    run = _prepare(subject.program, groups, subject.kernels)
    wires, watched, prices = Wires(run.p.rank), Watched(), _Prices(subject.priced, run, load or {})
    alive: list[int] = []
    before = [x.clone() for x in _held(run)]
    run.on_action = lambda name: alive.append(_settled(watched, prices.kept(len(alive))))
    with wires.watch(), watched:
        walk(run.p, run, targets_counted=False)
    run.on_action = None  # what walks it again is not observed
    verdict = Verdict(received=sum(run.received.values()))
    verdict.differences += _compare_bytes(prices.now(), wires, watched, alive)
    verdict.differences += _compare_routing(run)
    run.settle_parameters()
    if not all(map(torch.equal, before, _held(run))):
        verdict.differences.append(("values", "no optimizer moved a parameter, and yet one changed"))
    return run, verdict


def _held(run: Executor) -> list[torch.Tensor]:
    """The parameters that a rank holds between steps: whole buckets, or its shards of them."""
    return [flat.parameter if flat.cut_parameter is None else flat.cut_parameter for flat in run.state.flats]


def _prepare(p: Program, groups: ProcessGroups, kernels: dict[str, TorchKernel]) -> Executor:
    state = allocate(p, CPU)
    initialise(p, state, 0)
    steer(state.biases)
    for t in (
        *state.gradients.values(),
        *state.ring_buffers,
        *(f.own_gradient for f in state.flats if f.bucket.cut_gradients),
    ):
        t.fill_(float("nan"))  # whatever the first writer does not write shows
    run = Executor(p, state, Gloo(p.rank, groups), kernels, Fresh(p.precision, CPU))
    fixed = constants(p, CPU)
    mine = [[sample(i, p.sequence_length, p.model.vocab_size) for i in ids] for ids in samples_of(p, 0)]
    run.micro_batches = [fixed | micro_batch(p, samples, CPU) for samples in mine]
    run.counts.copy_(torch.tensor(target_counts(p, mine)))
    return run


@dataclass
class _Prices:
    """The price under the load seen so far; what has not been seen is as in the load that is known beforehand.

    It is asked anew only where routing has been seen that was not known.
    """

    p: Program
    run: Executor
    known: Mapping[tuple[int, int], int]
    of: dict[tuple[tuple[tuple[int, int], int], ...], Price] = field(default_factory=dict)

    def now(self) -> Price:
        load = {**self.known, **self.run.received}
        seen = tuple(sorted(load.items()))
        if seen not in self.of:
            self.of[seen] = price(self.p, Recorded(defaultdict(int, load)), targets_counted=False)
        return self.of[seen]

    def kept(self, action: int) -> int:
        """Bytes alive after an action; -1 past the priced ones."""
        kept = self.now().kept
        return kept[action][1] if action < len(kept) else -1


def _settled(watched: Watched, expected: int) -> int:
    """Bytes alive after an action. The transport drops finished buffers a moment late: it gets that moment, which is
    counted in turns of this thread, as all threads have fewer of them on busy cores."""
    for _ in range(TURNS):
        if watched.now <= expected:
            break
        time.sleep(0.001)
    return watched.now


def _compare_values(
    p: Program, want: Reference, gradients: list[ParameterPart], losses: dict[str, float], verdict: Verdict
) -> None:
    for piece in gradients:
        q = piece.param
        part = want[0][q.name]
        for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
            part = part.narrow(dim, at, n)
        part = part.reshape(-1)[piece.begin : piece.begin + len(piece.values)]
        error = _relative((piece.values - part).abs().max().item(), want[0][q.name].abs().max().item())
        if error > verdict.gradient:
            verdict.gradient, verdict.worst = error, q.name
    squares = sum(t.square().sum().item() for t in want[0].values())
    told = want[1] | {"norm": squares}
    verdict.loss = max(_relative(abs(x - told[name]), abs(told[name])) for name, x in losses.items())


def _relative(error: float, scale: float) -> float:
    """NaN, which compares with nothing, counts as infinite."""
    return inf if isnan(error) else error / scale if scale > ZERO else error


def _compare_bytes(priced: Price, wires: Wires, watched: Watched, alive: list[int]) -> Iterable[tuple[str, str]]:
    for key in sorted(set(priced.wires) | set(wires.bytes)):
        if priced.wires[key] != wires.bytes[key]:
            yield "wires", f"{key}: priced {priced.wires[key]}, seen {wires.bytes[key]}"
    if priced.total_flops != watched.flops:
        yield "FLOPs", f"priced {priced.total_flops}, counted {watched.flops}"
    for (action, expected), observed in zip(priced.kept, alive, strict=True):
        if expected != observed:
            yield "kept", f"after {action}: priced {expected}, alive {observed}"


def computed_by(p: Program) -> dict[str, TorchKernel]:
    """The reference, and products by groups where the layout asks for them."""
    return REFERENCE | ({} if p.layout.experts == "reference" else kernels(p, CPU))


def _in_arena(p: Program, groups: ProcessGroups) -> Executor:
    """The step with every register at its planned place, unobserved."""
    run = _prepare(p, groups, computed_by(p))
    run.memory = Arena(plan_arena(p), p.precision, CPU)
    walk(p, run, targets_counted=False)
    return run


def _compare_arena(run: Executor, placed: Executor) -> Iterable[tuple[str, str]]:
    """The same numbers, to the bit: no two registers that live at once, or on a wire, may overlap."""
    for mine, theirs in zip(
        run.state.parameter_parts("gradient"), placed.state.parameter_parts("gradient"), strict=True
    ):
        if not torch.equal(mine.values, theirs.values):
            far = (mine.values - theirs.values).abs().max().item()
            yield "arena", f"{mine.param.name} differs by {far:.1e}"


def _compare_routing(run: Executor) -> Iterable[tuple[str, str]]:
    """Every token is counted at each steered router, and none by the expert that the bias shuts."""
    lay, moe = run.p.layout, run.p.model.moe
    for name, counts in run.state.tokens_per_expert.items():
        counted, chosen = counts.tolist(), lay.global_batch_size * run.p.sequence_length * (moe.top_k if moe else 0)
        if sum(counted) != chosen or counted[0]:
            yield "routing", f"{name} counts {counted}, of {chosen} choices"
