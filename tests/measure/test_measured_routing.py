"""Rows that experts were sent in a run: how uneven they were, and the plan with them in place of even ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from observe import dropped_at_once
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.rank.rank import Rank
from penteract.measure.bench.ranks.case_measurement import imbalance, measurement, void
from penteract.measure.bench.ranks.random_samples import RandomSamples
from penteract.measure.bench.ranks.timed_steps import RankMeasurement, take_steps
from penteract.measure.report.measured_routing import as_routed
from penteract.readings.estimator import Estimator
from penteract.readings.explain.why import why
from penteract.readings.layers.expert_load import Balanced
from penteract.readings.price import price
from penteract.step.program import compile_step
from penteract.units import GIB
from pool import Pool

SETTINGS = ["parallel.dp=2", "parallel.ep=2", "batch.micro_batch_size=64", "batch.global_batch_size=256",
            "batch.sequence_length=256", "model.hidden_size=1024", "model.moe.experts=8", "model.moe.top_k=4",
            "model.moe.ffn_size=512"]  # fmt: skip
EXACT = "parallel.expert_rows=exact"
SMALL = (
    "batch.sequence_length=64", "model.hidden_size=64", "batch.micro_batch_size=8", "batch.global_batch_size=32",
)  # fmt: skip


def run_of(*more: str) -> RunSpec:
    return resolve(None, "tiny", [*SETTINGS, *more], world=2).run


def estimator_of(run: RunSpec, imbalance: float = 1.0) -> Estimator:
    policy, kinds = run.precision.policy, run.optimizer.optimizer_kinds
    return Estimator(run.model, cluster("2xH200"), run.sequence_length, policy, kinds, imbalance=imbalance)


def test_imbalance_is_of_the_fullest_rank_of_each_exchange() -> None:
    first, second = [[6, 2], [4, 4]], [[2, 6], [4, 4]]  # two steps of two exchanges
    assert imbalance([first, second], 4) == (6 + 6 + 4 + 4) / 4 / 4
    assert imbalance([[[]], [[]]], 4) == imbalance([[], []], 4) == 1
    assert imbalance([[[]], [[]], [[6]], [[2]]], 4) == 1.5, "a stage without experts"
    assert imbalance([[[4]], [[4]], [[4, 7]], [[4, 1]]], 4) == (4 + 7) / 2 / 4, "a stage with fewer"


def test_ranks_without_experts_keep_their_places() -> None:
    """A pipeline whose first stage has dense layers alone: rows are found by rank."""
    stages = ["parallel.pp=2", "model.layers=4", "model.moe.dense_layers=[0,1]"]
    run = resolve(None, "tiny", [*SETTINGS, *stages], world=4).run
    even = Balanced.of(run.model, run.layout, run.sequence_length).rows
    exchanges = 2 * run.layout.gradient_accumulation_steps
    routed = [[], [], [3 * even // 2] * exchanges, [even // 2] * exchanges]
    ranks = [RankMeasurement([1.0] * 3, [3.0, 2.0, 1.0], 100 + r, routed=[routed[r]] * 3) for r in range(4)]
    case: Any = SimpleNamespace(tokens=1, ranks=4, model_flops=1, model_flops_causal=1)
    found = measurement(case, ranks, 1, "random", None, even)
    assert len(found.routed_rows) == 4 and not found.routed_rows[0] and found.imbalance == 1.5
    assert as_routed(None, run, found.fullest, found.routed_rows[found.fullest], 1.0).allocated
    assert as_routed(None, run, 0, found.routed_rows[0], 1.0).allocated


def measured(rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec) -> RankMeasurement:
    me = Rank(rank, layout.world, torch.device("cpu"), None)  # type: ignore[arg-type]
    with dropped_at_once():  # on busy cores a thread of gloo may hold what it has sent longer than the run does
        return take_steps(run, me, RandomSamples(run.model.vocab_size, run.sequence_length, 8))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_with_the_rows_of_a_run_its_memory_is_the_plan(pool: Pool, recompute: str) -> None:
    """Within 0.1 %, and closer than with even rows."""
    run = run_of(f"memory.recompute={recompute}", "training.steps=3", "precision.dtype=fp32", *SMALL)
    even = Balanced.of(run.model, run.layout, run.sequence_length).rows
    ranks, off = list[RankMeasurement](), list[float]()
    for _ in range(3):  # and longer than it is waited for
        ranks = pool.run(measured, run.layout, run)
        plans = [as_routed(None, run, r, one.routed[1], 1.0).allocated or 0.0 for r, one in enumerate(ranks)]
        off = [abs(plan * GIB - one.allocated) for plan, one in zip(plans, ranks, strict=True)]
        if max(off) < 1e-3 * min(one.allocated for one in ranks):
            break
    assert len(ranks) == 2 and [len(one.routed) for one in ranks] == [3, 3]
    for rows in zip(*(one.routed[1] for one in ranks), strict=True):
        assert sum(rows) == 2 * even
    for r, one in enumerate(ranks):
        planned = as_routed(None, run, r, [even] * len(one.routed[1]), 1.0).allocated
        assert planned is not None and off[r] < 1e-3 * one.allocated
        assert off[r] < abs(planned * GIB - one.allocated)


def test_padded_rows_take_the_memory_of_the_plan_whatever_came(pool: Pool) -> None:
    """The rows are counted all the same, and the step of the fullest rank is planned with them."""
    padded = ("parallel.ep_method=all_gather", "parallel.expert_rows=padded", "kernels.experts=grouped")
    run = run_of("training.steps=3", "precision.dtype=fp32", *padded, *SMALL)
    exact = run_of("training.steps=3", "precision.dtype=fp32", *padded, "parallel.expert_rows=exact", *SMALL)
    ranks, others = (pool.run(measured, one.layout, one) for one in (run, exact))
    for r, (one, other) in enumerate(zip(ranks, others, strict=True)):
        assert one.routed == other.routed and one.losses == other.losses
        plan = as_routed(None, run, r, one.routed[1], 1.0).allocated
        assert plan == as_routed(None, run, r, [0] * len(one.routed[1]), 1.0).allocated
        assert plan is not None and abs(plan * GIB - one.allocated) < 1e-3 * one.allocated
    large = run_of("precision.dtype=bf16", *padded)
    estimator, rows = estimator_of(large), [1000] * large.model.layers * large.layout.gradient_accumulation_steps
    even, uneven = (as_routed(estimator, large, 0, rows, share).step for share in (1.0, 1.5))
    assert even is not None and uneven is not None and uneven > even


def test_a_case_whose_steps_were_repeated_counts_for_nothing(pool: Pool) -> None:
    """Blocks as small as even routing: no router is that even."""
    blocks = ("parallel.ep_method=all_to_all", "parallel.expert_rows=padded", "kernels.experts=grouped")
    run, exact = (
        run_of("training.steps=4", "precision.dtype=fp32", *blocks, *SMALL, *more)
        for more in (("parallel.capacity_percent=100",), (EXACT,))
    )
    ranks, others = (pool.run(measured, one.layout, one) for one in (run, exact))
    assert ranks[0].exact_steps[0] == 1 and all(one.exact_steps == ranks[0].exact_steps for one in ranks)
    assert [one.losses for one in ranks] == [one.losses for one in others]
    assert not any(one.exact_steps for one in others)
    assert "raise parallel.capacity_percent" in void(ranks[0].losses, ranks[0].exact_steps)
    assert not void(others[0].losses, others[0].exact_steps)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_even_rows_are_the_plan(recompute: str) -> None:
    run = run_of(f"memory.recompute={recompute}", "precision.dtype=bf16")
    estimator = estimator_of(run)
    even = Balanced.of(run.model, run.layout, run.sequence_length).rows
    exchanges = run.model.layers * run.layout.gradient_accumulation_steps
    found = as_routed(estimator, run, 1, [even] * exchanges, 1.0)
    assert found.step == 1e3 * estimator.time(estimator.estimate(run.layout)).seconds
    p = compile_step(run.model, run.layout, run.sequence_length, rank=1, precision=run.precision.policy)
    assert found.allocated == price(p).allocated / GIB <= estimator.estimate(run.layout).allocated / GIB
    uneven = as_routed(estimator, run, 1, [even, 2 * even] * (exchanges // 2), 1.1)
    assert uneven.allocated is not None and uneven.step is not None
    assert uneven.allocated > found.allocated and uneven.step > found.step
    with pytest.raises(ValueError, match="zip"):
        as_routed(estimator, run, 1, [even], 1.0)


def test_a_plan_for_the_fullest_rank_is_one_for_as_many_more_rows() -> None:
    """Memory and time grow where rows are exchanged, and nowhere else; so do the formulas."""
    for more, grows in (("parallel.ep=2", True), ("parallel.ep=1", False)):
        run = run_of(more, "precision.dtype=bf16")
        even, uneven = estimator_of(run), estimator_of(run, 1.5)
        one, other = even.estimate(run.layout), uneven.estimate(run.layout)
        assert (other.allocated > one.allocated) == grows
        assert (uneven.time(other).seconds > even.time(one).seconds) == grows
        assert uneven.time(other).seconds >= other.at_least
        kept = [why(run.model, run.layout, 256, "bf16", imbalance=share).total("kept") for share in (1.0, 1.5)]
        p = compile_step(run.model, run.layout, 256, precision="bf16")
        for share, told in zip((1.0, 1.5), kept, strict=True):
            walked = price(p, Balanced.of(run.model, run.layout, 256, share))
            assert max(n for _, n in walked.kept) == told
        assert (kept[1] > kept[0]) == grows
        assert replace(other, memory=one.memory, allocated=one.allocated, by_pp_rank=one.by_pp_rank) == one or grows


def test_no_rank_gets_more_than_all_rows_and_exchanges_wait_for_the_fullest() -> None:
    run = run_of("precision.dtype=bf16", "parallel.ep_method=all_to_all")
    twice, more, even = (estimator_of(run, share) for share in (2.0, 8.0, 1.0))
    assert more.estimate(run.layout) == twice.estimate(run.layout)
    assert more.time(more.estimate(run.layout)) == twice.time(twice.estimate(run.layout))
    # Two of eight experts are on each of four ranks: of a token's four copies one of these gets two at most.
    spread = replace(run.layout, dp=4, ep=4)
    assert Balanced.of(run.model, spread, 256, 8.0).rows == 2 * Balanced.of(run.model, spread, 256).rows
    kept = [why(run.model, run.layout, 256, "bf16", imbalance=share).total("kept") for share in (2.0, 8.0)]
    assert kept[0] == kept[1]
    actions = compile_step(run.model, run.layout, 256).chunks[0].actions.values()
    calls = [one.call for some in actions for one in some]
    sites = [call.site for call in calls if call.site.op_name == "all_to_all_v" and call.phase == "start"]
    assert {site.attrs["direction"] for site in sites} == {"dispatch", "combine"}
    for site in sites:
        took = [one.steps.device(run.layout).collective(site) for one in (even, twice)]
        assert took[1] > 1.1 * took[0]
