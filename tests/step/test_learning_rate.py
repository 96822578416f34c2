"""The learning rate by step."""

from __future__ import annotations

import pytest

from penteract.config.run import LearningRateSchedule
from penteract.step.learning_rate import rate


def test_warm_up_then_cosine_to_its_final_fraction() -> None:
    spec = LearningRateSchedule(kind="cosine", warmup_steps=4, final_fraction=0.1)
    rates = [rate(spec, 2.0, s, 12) for s in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way
    assert rates[-1] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_linear_falls_evenly() -> None:
    spec = LearningRateSchedule(kind="linear", warmup_steps=0, final_fraction=0.0)
    assert [rate(spec, 1.0, s, 4) for s in (1, 2, 3, 4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_wsd_stays_and_then_falls() -> None:
    spec = LearningRateSchedule(kind="wsd", warmup_steps=2, final_fraction=0.1, decay_fraction=0.2)
    rates = [rate(spec, 1.0, s, 10) for s in range(1, 11)]
    assert rates[1:8] == [1.0] * 7
    assert rates[8:] == pytest.approx([0.55, 0.1])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_decay_that_ends_where_it_is_told_to_is_that_of_a_run_of_so_many_steps(kind: str) -> None:
    plain = LearningRateSchedule(kind=kind, warmup_steps=2)  # type: ignore[arg-type]
    ends = LearningRateSchedule(kind=kind, warmup_steps=2, decay_end=10)  # type: ignore[arg-type]
    for steps in (5, 40):  # a run that ends in it, and one that goes on after it
        assert [rate(ends, 1.0, s, steps) for s in range(1, 11)] == [rate(plain, 1.0, s, 10) for s in range(1, 11)]
    assert {rate(ends, 1.0, s, 40) for s in range(10, 41)} == {rate(plain, 1.0, 10, 10)}


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_edges(kind: str) -> None:
    assert 0 <= rate(LearningRateSchedule(kind=kind, warmup_steps=0), 1.0, 1, 1) <= 1  # type: ignore[arg-type]
    assert rate(LearningRateSchedule(kind=kind, warmup_steps=5), 1.0, 3, 3) == pytest.approx(0.6)  # type: ignore[arg-type]
