"""Weights that travel in FP8: the same bits as without, half the bytes on the wire and in the ring, as priced."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from layouts import Case, Subject, _prepare, _step
from parity.test_fp8 import DENSE, EXPERTS, LATENT, length
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.fp8 import usual
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine import checkpoint
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.session.saved import after_load, load_state, state_slices
from penteract.readings.price import price, resident
from penteract.step.all_reduces import StepAllReduce
from penteract.step.walk import walk
from pool import Pool
from precisions import differ, kept
from training import train, trainer

TIED = replace(DENSE, tied=True, qkv_bias=True)
PLACES = [
    (DENSE, Layout(dp=2, zero=3)),
    (DENSE, Layout(dp=4, zero=3, shard_group=2, gradient_accumulation_steps=2, reshard_after_step=True)),
    (TIED, Layout(dp=2, tp=2, zero=3, recompute=("*",), offload_optimizer=True)),
    (LATENT, Layout(tp=2, cp=2, zero=3, cp_method="ring", reduce_scatter_once=True)),
    (DENSE, Layout(dp=2, pp=3, zero=3, gradient_accumulation_steps=3, schedule="zb_h1")),
]
# Whose buckets are others with data, so that sums over them are of another order.
MIXED = [
    (EXPERTS, Layout(dp=2, cp=2, ep=2, zero=3)),
    (replace(DENSE, mtp_layers=1), Layout(dp=2, pp=3, zero=3, gradient_accumulation_steps=3, schedule="zb_h1")),
]


MUON = OptimizerKinds(matrices=OptimizerKind("muon", 2))


def recipe(policy: Policy, *, gather: bool, powers: bool = False) -> Policy:
    return replace(policy, fp8=replace(usual("tensorwise"), gather=gather, powers=powers))


def joined(rank: int, groups: ProcessGroups, case: Case) -> Executor:
    """This rank's trainer."""
    p = case.compile(rank)
    groups.make(needed(p))
    return trainer(case, p, groups)


def bits(run: Executor) -> list[torch.Tensor]:
    """Of all that an update moved, and of the gradients."""
    gradients = [flat.own_gradient.clone().view(torch.uint8) for flat in run.state.flats]
    return [*kept(run.state, whole=False), *gradients]


# ---- the same numbers --------------------------------------------------------------------------------------------


def alike(rank: int, groups: ProcessGroups, cases: tuple[Case, Case], steps: int) -> tuple[bool, list[int]]:
    """Whether two runs have the same losses, and which of their buffers differ."""
    runs = [joined(rank, groups, case) for case in cases]
    one, other = (([*train(run, steps)], bits(run)) for run in runs)
    return one[0] == other[0] and len({*one[0]}) == steps, differ(one[1], other[1])


@pytest.mark.parametrize(("model", "layout"), PLACES, ids=str)
def test_a_run_is_the_same_to_the_bit(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    policies = (recipe(RECIPES["bf16"], gather=gather, powers=layout.pp > 1) for gather in (False, True))
    optimizer_kinds = MUON if layout.shard_group else PLAIN
    cases = tuple(
        Case(model, layout, length(model), precision=policy, optimizer_kinds=optimizer_kinds) for policy in policies
    )
    assert pool.run(alike, cases, 3) == [(True, [])] * layout.world


def deaf(rank: int, groups: ProcessGroups, cases: tuple[Case, Case], steps: int) -> tuple[bool, list[int]]:
    """`alike`, where every rank makes scales of its own shards."""
    all_reduce = Executor.all_reduce

    def of_others(self: Executor, reduction: StepAllReduce) -> None:
        if reduction.name != "scales of weights":
            all_reduce(self, reduction)

    with patch.object(Executor, "all_reduce", of_others):
        return alike(rank, groups, cases, steps)


def test_scales_of_a_shard_alone_are_seen(pool: Pool) -> None:
    model, layout = PLACES[0]
    policies = (recipe(RECIPES["bf16"], gather=gather) for gather in (False, True))
    cases = tuple(Case(model, layout, length(model), precision=policy) for policy in policies)
    assert all(told != (True, []) for told in pool.run(deaf, cases, 3))


def resumed(rank: int, groups: ProcessGroups, cases: tuple[Case, Case], folder: Path) -> list[int]:
    """Which buffers differ, where a run of the second case goes on with what one of the first has saved."""
    first, second = (joined(rank, groups, case) for case in cases)
    world = cases[0].layout.world
    assert len([*train(first, 2)]) == 2
    barrier = partial(dist.barrier, group=groups[tuple(range(world))])
    checkpoint.save(
        folder, 2, state_slices(first.p, first.state), {}, rank=rank, world=world, barrier=barrier
    )  # fmt: skip
    load_state(checkpoint.latest(folder), second.p, second.state)
    after_load(second)
    return [-1] * ([*train(first, 2)] != [*train(second, 2)]) + differ(bits(first), bits(second))


def test_a_checkpoint_is_of_numbers_whatever_travels(pool: Pool, tmp_path: Path) -> None:
    policies = [recipe(RECIPES["bf16"], gather=gather) for gather in (False, True)]
    for name, some in (("on", policies), ("off", policies[::-1])):
        cases = tuple(Case(DENSE, Layout(dp=2, zero=3), 64, precision=policy) for policy in some)
        assert pool.run(resumed, cases, tmp_path / name) == [[], []]


# ---- bytes -------------------------------------------------------------------------------------------------------


def measured(rank: int, groups: ProcessGroups, cases: tuple[Case, Case]) -> list[str]:
    """What a step of the second case took, beside its price; and its loss beside that of the first."""
    plain, p = (case.compile(rank) for case in cases)
    groups.make(needed(p))
    run, verdict = _step(Subject(p, p, dict(REFERENCE), ExitStack()), groups)
    one = _prepare(plain, groups, dict(REFERENCE))
    walk(plain, one, targets_counted=False)
    wrong = [f"{kind}: {what}" for kind, what in verdict.differences]
    there, before = resident(p), resident(plain)
    if bytes_of(run.state.resident()) != sum(there.values()) - there["data"]:
        wrong.append(f"resident: priced {there}, allocated {bytes_of(run.state.resident())}")
    assert run.state.quantised_weights is not None
    if bytes_of([run.state.quantised_weights.table]) != there["data"] - before["data"]:
        wrong.append("scales are not as priced")
    if run.totals[1] != one.totals[1]:
        wrong.append(f"loss {run.totals[1]}, without data on the wire {one.totals[1]}")
    return wrong


@pytest.mark.parametrize(
    ("model", "layout"),
    [PLACES[1], PLACES[3], *MIXED],
    ids=str,
)
def test_a_step_takes_what_its_price_says(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    cases = tuple(
        Case(model, layout, length(model), precision=recipe(RECIPES["fp64"], gather=gather)) for gather in (False, True)
    )
    told = pool.run(measured, cases)
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


def test_half_of_the_bytes_travel_and_lie_in_the_ring() -> None:
    """By hand: a layer's linears are q, k, v and o of [64, 32], and three of [64, 32] of its MLP."""
    case = Case(DENSE, Layout(dp=2, zero=3), 64)
    plain, in_fp8 = (
        replace(case, precision=recipe(RECIPES["bf16"], gather=gather)).compile(0) for gather in (False, True)
    )
    linears, (before, after) = 7 * 64 * 32, (price(p) for p in (plain, in_fp8))
    assert before.resident["ring_buffer"] - after.resident["ring_buffer"] == 2 * linears  # of two places
    gathered = sum(around.before.count(("gather", b)) for around in in_fp8.events.values()
                   for b, bucket in enumerate(in_fp8.buckets) if bucket.gathered_as == "fp8")  # fmt: skip
    assert gathered in range(2 * DENSE.layers - 2, 2 * DENSE.layers + 1)  # in each direction, but for those still there
    group = (0, 1)
    assert before.wires["all_gather", group] - after.wires["all_gather", group] == gathered * linears
    assert before.resident["parameters"] == after.resident["parameters"]
