"""Memory of a GPU beside tensors: how many communicators a rank opens, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract import Layout, rehearse
from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.readings.estimator import Estimator
from penteract.readings.memory.process_memory import Communicators, communicators, process_memory

SPEC = model("llama-3.2-1b")


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ("parallel.dp=4 parallel.zero=1", Communicators(1, 0)),
        ("parallel.dp=2 parallel.tp=2 parallel.zero=1", Communicators(3, 0)),  # dp, tp, and both for the norm
        ("parallel.dp=2 parallel.pp=2", Communicators(2, 2)),  # dp, and all
        ("parallel.dp=4 parallel.zero=3 parallel.shard_group=2", Communicators(3, 0)),
        ("parallel.tp=2 parallel.pp=2 parallel.schedule=interleaved parallel.vpp=2", Communicators(2, 2)),
        ("parallel.pp=4 parallel.schedule=interleaved parallel.vpp=2 model.layers=8", Communicators(1, 2, further=2)),
        ("parallel.cp=2 parallel.dp=2 parallel.cp_method=ulysses", Communicators(2, 0, mixed=True)),
        ("parallel.cp=4 parallel.cp_method=ring", Communicators(1, 0, mixed=True)),
    ],
)
def test_a_rank_opens_a_communicator_for_each_group_that_its_walk_calls(settings: str, opened: Communicators) -> None:
    """As the engine's own walk of the rank calls them."""
    words = ["batch.global_batch_size=4", "batch.micro_batch_size=1", "batch.sequence_length=64", *settings.split()]
    run = resolve(None, "tiny", words).run
    estimator = Estimator(run.model, cluster("4xH200"), run.sequence_length, run.precision.policy)
    for number in (0, run.layout.world - 1):
        assert communicators(estimator, run.layout, number) == opened
        (rank,) = rehearse(run, rank=number).ranks
        called = {(one.ranks, one.first, one.step) for one in rank.wires if one.kind not in ("send", "recv")}
        assert len(called) == opened.collectives
        assert len({one.channel for one in rank.groups if one.channel}) == opened.messages
        between = [(one.first, one.first + one.step) for one in rank.wires if one.kind in ("send", "recv")]
        if neighbours := {one for both in between for one in both} - {number}:
            assert opened.further == opened.messages * (len(neighbours) - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_inner_ranks_of_a_pipeline_have_two_neighbours(schedule: str) -> None:
    """The fullest GPU may be that of another rank than the one with the most tensors."""
    estimator = Estimator(replace(SPEC, tied=False), cluster("4xH200"), 8192)
    lay = Layout(pp=4, schedule=schedule, gradient_accumulation_steps=4)  # type: ignore[arg-type]
    assert [communicators(estimator, lay, r).further for r in range(4)] == [0, 2, 2, 0]
    found = process_memory(estimator, estimate := estimator.estimate(lay))
    assert found is not None
    even = replace(estimate, by_pp_rank=(estimate.allocated,) * 4)
    level = process_memory(estimator, even)
    assert level is not None and 0 <= level.device - found.device <= 2 * 582 * 2**20
    ends = process_memory(estimator, replace(estimate, by_pp_rank=(estimate.allocated, 0, 0, estimate.allocated)))
    assert ends is not None and level.device - ends.device == 2 * 582 * 2**20


def test_a_file_without_further_neighbours_knows_pipelines_of_two() -> None:
    node = cluster("4xH200")
    assert node.curves is not None
    older = tuple((name, mib) for name, mib in node.curves.process if name != "further_neighbour")
    estimator = Estimator(SPEC, replace(node, curves=replace(node.curves, process=older)), 8192)
    for pp, known in ((2, True), (4, False)):
        lay = Layout(dp=4 // pp, pp=pp, gradient_accumulation_steps=4)
        assert (process_memory(estimator, estimator.estimate(lay)) is not None) == known


def test_what_was_not_measured_is_not_told() -> None:
    exchanging = Layout(cp=8, cp_method="ulysses")
    for gpus, lay, known in (
        ("8xH200", Layout(dp=8), True),
        ("8xH100", Layout(dp=8), False),
        ("8xH200", exchanging, False),
    ):
        estimator = Estimator(SPEC, cluster(gpus), 8192)
        found = process_memory(estimator, estimate := estimator.estimate(lay))
        assert (found is not None) == known
        if found is not None:
            assert estimate.allocated < found.reserved < found.device < estimate.allocated + 2 * 2**30
