"""Registers with room for the most rows that routing can send: a step has the bits of one with exact sizes, however
uneven routing is, and all of its calls are bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from layouts import CPU, Case, _prepare, computed_by
from penteract.config.layout import ExpertRows, Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.allocator import Arena
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price
from penteract.step.arena import plan_arena
from penteract.step.walk import walk
from pool import Pool
from tiny import SIZES

MODEL = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=16, score="sigmoid", balance="bias"))
LAYOUT = Layout(dp=2, ep=2, ep_method="all_gather", experts="grouped", gradient_accumulation_steps=2)
TOKENS = 12
ROOM = 2 * TOKENS * 2  # of two ranks' tokens, both copies


@dataclass(frozen=True)
class Walked:
    """Two steps of a rank with the same data: what the second has left."""

    gradients: dict[str, torch.Tensor]
    rows: dict[tuple[int, int], int]
    loose: set[str]  # ops with calls that are not bound
    outside: int  # bytes of registers outside of the arena


def _walked(rank: int, groups: ProcessGroups, case: Case, shut: int) -> Walked:
    """`shut`: the rank whose experts no token chooses; -1: none."""
    p = case.compile(rank)
    groups.make(needed(p))
    run = _prepare(p, groups, computed_by(p))
    for bias in run.state.biases.values():
        bias.zero_()
        if shut >= 0:
            bias.view(2, -1)[shut] = -10
    run.memory = Arena(plan_arena(p), p.precision, CPU)
    for _ in range(2):
        walk(p, run, targets_counted=False)
    run.settle_parameters()
    calls = [(buffer, i.call) for action in p.actions for buffer, i in p.instructions(action)]  # type: ignore[arg-type]
    computed = [(buffer, call) for buffer, call in calls if call.phase not in ("start", "finish")]
    loose = {call.site.op_name for buffer, call in computed if (buffer, call) not in run.registers.bound}
    gradients = {name: x.clone() for name, x in run.state.gradients.items()}
    return Walked(gradients, run.received, loose, price(p, Recorded(run.received)).routed)


def _case(rows: ExpertRows) -> Case:
    return Case(MODEL, replace(LAYOUT, expert_rows=rows), sequence_length=TOKENS)


@pytest.mark.parametrize("shut", [-1, 0, 1])
def test_a_step_has_the_bits_of_exact_sizes(pool: Pool, shut: int) -> None:
    exact, padded = (pool.run(_walked, _case(rows), shut) for rows in ("exact", "padded"))
    for rank, (one, other) in enumerate(zip(exact, padded, strict=True)):
        assert one.rows == other.rows and len(one.rows) == MODEL.layers * 2
        if shut >= 0:
            assert {*one.rows.values()} == {0 if rank == shut else ROOM}
        assert one.gradients.keys() == other.gradients.keys()
        assert all(torch.equal(g, other.gradients[name]) for name, g in one.gradients.items())


def test_all_calls_are_bound(pool: Pool) -> None:
    exact, padded = (pool.run(_walked, _case(rows), -1)[0] for rows in ("exact", "padded"))
    assert {"split_sizes", "permute", "expert_linear", "unpermute"} <= exact.loose and exact.outside
    assert not padded.loose and not padded.outside
