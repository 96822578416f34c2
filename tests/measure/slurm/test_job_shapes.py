"""Nodes, times and costs of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.slurm.batches import FULL, PLAIN
from penteract.config.run import Slurm
from penteract.errors import BadInput
from penteract.slurm.job_shape import JobShape, cost_line, job_shape, seconds_of


@pytest.mark.parametrize(
    ("ranks", "slurm", "shape"),
    [(1, PLAIN, (1, 1)), (4, PLAIN, (1, 4)), (8, PLAIN, (2, 4)), (6, replace(PLAIN, nodes=3), (3, 2)),
     (64, replace(PLAIN, ranks_per_node=8), (8, 8))],
)  # fmt: skip
def test_nodes_follow_from_ranks(ranks: int, slurm: Slurm, shape: tuple[int, int]) -> None:
    found = job_shape(ranks, slurm)
    assert (found.nodes, found.on_a_node) == shape


@pytest.mark.parametrize(("ranks", "slurm"), [(7, PLAIN), (9, replace(PLAIN, nodes=2)), (8, replace(PLAIN, nodes=1))])
def test_nodes_that_ranks_do_not_fill_are_refused(ranks: int, slurm: Slurm) -> None:
    with pytest.raises(BadInput, match=r"slurm\.ranks_per_node · found 4"):
        job_shape(ranks, slurm)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("auto", None), ("90", 5400), ("90:30", 5430), ("01:00:05", 3605), ("2-3", 183_600), ("2-3:04", 183_840),
     ("2-03:04:05", 183_845), ("0:15", 15), ("10080", 604_800)],
)  # fmt: skip
def test_times_are_read_as_slurm_does(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@given(st.text(max_size=12))
def test_a_time_is_seconds_or_refused(text: str) -> None:
    try:
        assert (seconds_of(text) or 0) >= 0
    except BadInput:
        assert not text.isdigit() or not text.isascii() or len(text) > 6


def test_what_a_job_costs() -> None:
    shape = JobShape(4, 32)
    assert cost_line(shape, FULL, 86_400.0) == (
        "32 GPUs on 4 nodes for at most 24 h 00 min: 768 GPU-hours, 1 920.00 USD at 2.5 USD a GPU-hour"
    )
    assert cost_line(JobShape(1, 1), PLAIN, 1800.0, 12) == (
        "12 jobs of at most 1 GPU on 1 node for at most 30 min 00 s: 6 GPU-hours"
    )
    assert cost_line(shape, replace(FULL, gpus="none"), None) == (
        "32 ranks on 4 nodes without a limit of time: 32 rank-hours an hour, 80.00 USD at 2.5 USD a rank-hour"
    )
