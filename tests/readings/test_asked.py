"""What an estimator says of a layout hangs on the layout alone, and not on what was asked before it.

`tests/asked_long.py` (`make test-all`) asks 2,000 layouts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract.config.layout import Layout
from readings.asked import ASKINGS, answers, drawn_layouts, unlike

FEW = {"tied": 16, "experts": 16, "ahead": 10, "fp8": 16}  # `tests/asked_long.py` asks two thousand


@pytest.mark.parametrize("name", ASKINGS)
def test_one_quoter_answers_as_fresh_ones_do(name: str) -> None:
    asking = ASKINGS[name]
    assert [*unlike(asking, drawn_layouts(asking, FEW[name], seed=11))] == []


def test_who_sums_a_bucket_follows_from_how_it_is_cut() -> None:
    """Under one layout experts and attention share a bucket, under the other they do not: a bucket of as many elements
    that is cut as it is has the ranks of its own layout, whatever parameters were seen with it first."""
    asking = ASKINGS["ahead"]
    state = {"vpp": 1, "expert_tp": 4, "bucket_bytes": 2**16, "tp": 4}
    first = Layout(dp=2, pp=2, ep=1, schedule="zb_h1", gradient_accumulation_steps=4, offload_optimizer=True, **state)
    then = Layout(dp=4, ep=4, zero=1, shard_group=4, gradient_accumulation_steps=2, micro_batch_size=4, **state)
    used = asking.estimator()
    answers(used, first)
    assert answers(used, then) == answers(asking.estimator(), then)


@pytest.mark.parametrize("name", ASKINGS)
def test_what_is_held_between_steps_does_not_depend_on_the_micro_batch(name: str) -> None:
    """A search asks it once for all sizes and counts of the micro-batch."""
    asking = ASKINGS[name]
    estimator = asking.estimator()
    for layout in drawn_layouts(asking, FEW[name], seed=12):
        sizes = [replace(layout, micro_batch_size=n) for n in (1, 2, 8)]
        steps = [replace(layout, gradient_accumulation_steps=layout.gradient_accumulation_steps * n) for n in (2, 3)]
        assert len({estimator.least(lay) for lay in (*sizes, *steps)}) == 1, layout


@pytest.mark.parametrize("zero", [2, 3])
def test_the_body_of_the_loss_decides_which_gradients_may_wait(zero: int) -> None:
    """In chunks the head's weight gradient cannot: under zero-bubble it is in another bucket, whatever came first."""
    asking = ASKINGS["fp8"]
    pair = [
        Layout(dp=8, pp=2, schedule="zb_h1", gradient_accumulation_steps=4, zero=zero, loss=loss)
        for loss in ("reference", "chunked")
    ]
    for first, second in (pair, pair[::-1]):
        used = asking.estimator()
        answers(used, first)
        assert answers(used, second) == answers(asking.estimator(), second)
