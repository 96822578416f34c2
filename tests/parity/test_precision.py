"""Each recipe on a layout is the same recipe in one process, up to its own rounding, and takes what its price says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from draws import in_turn
from layouts import CPU, Case, Subject, _prepare, _step, made_once
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_counts
from penteract.engine.kernels.kernel import Env, Tensors
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.optim.optimizer import AdamW
from penteract.ops.tape import Site
from penteract.readings.price import resident
from penteract.step.walk import walk
from pool import Pool
from precisions import BY_NAME, differ, kept
from samples import sample
from tiny import SIZES
from tolerances import LAYOUTS

DENSE = ModelSpec(**SIZES | {"initial_std": 0.1}, tied=True, qkv_bias=True)
# Experts where every rank sees whole sequences alone: elsewhere rounding may route a token to another one.
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=24, dense_layers=(0,)))
PLACES = [
    (DENSE, Layout(dp=2, tp=2, zero=1, bucket_bytes=2**12)),
    (DENSE, Layout(pp=2, cp=2, gradient_accumulation_steps=4, cp_method="ring")),
    (EXPERTS, Layout(dp=4, ep=2, zero=1)),
]
STEPS = 3


def on_its_own(case: Case) -> Case:
    """One process that takes the same micro-batches one after the other."""
    lay = case.layout
    micros = lay.dp * lay.gradient_accumulation_steps
    return replace(case, layout=Layout(micro_batch_size=lay.micro_batch_size, gradient_accumulation_steps=micros))


def losses(run: Executor) -> list[float]:
    """Of a few steps with updates."""
    p, out = run.p, list[float]()
    run.optimizer = AdamW(Optimizer(learning_rate=3e-3), CPU, 0, run.state.scaling)
    run.optimizer.rate.fill_(3e-3)
    for step in range(STEPS):
        run.optimizer.step.fill_(step + 1)
        mine = [[sample(i, p.sequence_length, p.model.vocab_size) for i in ids] for ids in samples_of(p, 0)]
        run.micro_batches = [constants(p, CPU) | micro_batch(p, samples, CPU) for samples in mine]
        run.counts.copy_(torch.tensor(target_counts(p, mine)))
        walk(p, run, targets_counted=False)
        out.append(run.totals[1].item())
    return out


def in_one_process(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A step's gradients, and the losses of a few."""
    run = _prepare(on_its_own(case).compile(0), ProcessGroups(), dict(REFERENCE))
    walk(run.p, run)
    gradients = {name: t.clone() for name, t in run.state.gradients.items()}
    return gradients, losses(run)


def held(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    """What is wrong on this rank."""
    p = case.compile(rank)
    groups.make(needed(p))
    run, verdict = _step(Subject(p, p, dict(REFERENCE), ExitStack()), groups)
    wrong = [f"{kind}: {what}" for kind, what in verdict.differences]
    priced = sum(size for kind, size in resident(p).items() if kind != "data")
    if (seen := bytes_of(t for f in run.state.flats for t in f.buffers)) != priced:
        wrong.append(f"resident: priced {priced}, allocated {seen}")
    gradients, alone = made_once(rank, groups, case.layout, lambda: in_one_process(case))
    most = LAYOUTS[p.precision.compute]
    for piece in run.state.parameter_parts("gradient"):
        q, whole = piece.param, gradients[piece.param.name].float()
        part = whole
        for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
            part = part.narrow(dim, at, n)
        part = part.reshape(-1)[piece.begin : piece.begin + len(piece.values)]
        error = ((piece.values.float() - part).abs().max() / whole.abs().max()).item()
        if not error < most:
            wrong.append(f"{piece.param.name} is off by {error:.1e}")
    for step, (x, y) in enumerate(zip(losses(run), alone, strict=True)):
        if not abs(x / y - 1) < most / 10:
            wrong.append(f"step {step}: loss {x}, of one process {y}")
    return wrong


NARROW = replace(BY_NAME, reduce="bf16")  # sums in 16 bits, moments in 8 and by name: all at once


EVERY = [*(RECIPES[name] for name in ("bf16", "bf16_pure", "fp16")), NARROW]


@pytest.mark.parametrize(("policy", "place"), in_turn(EVERY, PLACES, lambda policy: "a recipe"), ids=str)
def test_a_layout_is_one_process_in_every_recipe(pool: Pool, policy: Policy, place: tuple[ModelSpec, Layout]) -> None:
    model, layout = place
    told = pool.run(held, Case(model, layout, precision=policy))
    assert [f"{layout} rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


def overflowed(rank: int, groups: ProcessGroups, case: Case, step: int, what: str) -> list[int]:
    """Which of this rank's buffers differ, where one element of one rank's gradient, or its loss alone, overflowed in
    `step`, from those of a run that made no such step, its scale set by hand."""
    p = case.compile(rank)
    groups.make(needed(p))
    ends = list[list[torch.Tensor]]()
    for poisoned in (True, False):
        run = _prepare(p, groups, dict(REFERENCE))
        assert run.state.scaling is not None
        counts = run.counts.clone()  # of this rank; a step sums them in their place
        run.optimizer = AdamW(Optimizer(learning_rate=3e-3), CPU, 0, run.state.scaling)
        run.optimizer.rate.fill_(3e-3)
        for n in range(1, step + 3):
            run.optimizer.step.fill_(n)
            if n == step and not poisoned:
                run.state.scaling.values.copy_(torch.tensor([2.0**9, 0, 1], dtype=torch.float64))
                continue
            here = n == step and rank == case.layout.world - 1
            bad = {"linear": replace(REFERENCE["linear"], weight_gradient=_infinite)}
            run.kernels = REFERENCE | (bad if here and what == "gradient" else {})
            run.on_action = _lose(run) if here and what == "loss" else None
            run.counts.copy_(counts)
            walk(p, run, targets_counted=False)
        run.settle_parameters()
        ends.append([*kept(run.state), run.state.scaling.values])
    return differ(*ends)


def _infinite(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
    plain = REFERENCE["linear"].weight_gradient
    assert plain is not None
    plain(env, site, ins, into, add)
    into[0].view(-1)[0] = float("inf")


def _lose(run: Executor) -> Callable[[str], None]:
    """After each action the loss is not finite; gradients are as ever."""
    return lambda action: run.totals[1].fill_(float("nan"))  # type: ignore[return-value]


@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2, zero=1), Layout(pp=2, gradient_accumulation_steps=2)], ids=str)
def test_an_overflow_on_one_rank_skips_the_update_on_all(pool: Pool, layout: Layout, what: str) -> None:
    policy = replace(RECIPES["fp16"], loss_scale=2.0**10)
    told = pool.run(overflowed, Case(DENSE, layout, precision=policy), 2, what)
    assert told == [[]] * layout.world
