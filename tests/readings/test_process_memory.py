"""Memory of a GPU beside tensors: how many communicators a rank opens, and what is not known."""

from __future__ import annotations

import pytest

from penteract import Layout
from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.readings.estimator import Estimator
from penteract.readings.process_memory import Communicators, communicators, process_memory

SPEC = model("llama-3.2-1b")


@pytest.mark.parametrize(
    ("layout", "opened"),
    [
        (Layout(), Communicators(0, 0)),
        (Layout(dp=8, zero=1), Communicators(1, 0)),
        (Layout(dp=4, tp=2, zero=1), Communicators(3, 0)),  # dp, tp, and both for the norm
        (Layout(pp=2, dp=4, gradient_accumulation_steps=4), Communicators(2, 2)),  # dp, and all
        (Layout(dp=8, zero=3, shard_group=4), Communicators(3, 0)),
    ],
)
def test_a_rank_opens_a_communicator_for_each_group_that_it_calls(layout: Layout, opened: Communicators) -> None:
    estimator = Estimator(SPEC, cluster("8xH200"), 8192)
    assert communicators(estimator, layout) == opened


def test_what_was_not_measured_is_not_told() -> None:
    lay = Layout(dp=8)
    for gpus, known in (("8xH200", True), ("8xH100", False)):
        estimator = Estimator(SPEC, cluster(gpus), 8192)
        found = process_memory(estimator, estimate := estimator.estimate(lay))
        assert (found is not None) == known
        if found is not None:
            assert estimate.allocated < found.reserved < found.device < estimate.allocated + 2 * 2**30
