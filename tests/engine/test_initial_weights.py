"""Weights that threads draw are those that are drawn one after the other."""

from __future__ import annotations

import pytest
import torch

from layouts import CPU
from penteract.config.layout import Layout
from penteract.config.presets import TINY, TINY_MOE
from penteract.engine.executor import initial_weights
from penteract.engine.executor.initial_weights import drawn, initial, initialise
from penteract.engine.executor.state import allocate
from penteract.step.program import compile_step


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_draw_the_same_in_the_same_order(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "usable_here", lambda: threads)
    p = compile_step(TINY_MOE, Layout(tp=2), 32, rank=1)
    found = list(drawn(p, 7))
    assert [q.name for q, _ in found] == [q.name for q in p.params]
    assert all(torch.equal(x, initial(p, q, 7)) for q, x in found)


def test_a_large_model_starts_as_a_small_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    p = compile_step(TINY, Layout(), 32)
    plain, threaded = allocate(p, CPU), allocate(p, CPU)
    initialise(p, plain, 3)
    monkeypatch.setattr(initial_weights, "FEW", 0)
    initialise(p, threaded, 3)
    for one, other in zip(plain.flats, threaded.flats, strict=True):
        assert torch.equal(one.parameter, other.parameter)
        assert torch.equal(one.master, other.master)
