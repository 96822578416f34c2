"""How layers are assigned to stages, and which assignment balances them with the head."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.config.layout import Layout
from penteract.config.resolve.presets import preset
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.model.count import head_in_layers
from penteract.parallel.pipeline import balanced, stage_layers
from penteract.schedule.registry import SCHEDULES
from schedules import V_SHAPED

MODEL = preset("llama-3.1-8b").model


def dealt(layers: int, stages: int, less: int) -> list[int]:
    """One layer after another to a stage with the fewest, the first of these; the last stage has `less` before."""
    has = [0] * (stages - 1) + [less]
    for _ in range(layers):
        has[has.index(min(has))] += 1
    return [*has[:-1], has[-1] - less]


@given(st.integers(2, 8), st.integers(0, 5), st.integers(1, 60))
def test_stages_are_dealt_layers_as_if_the_last_had_more(stages: int, less: int, layers: int) -> None:
    layout = Layout(pp=stages, last_stage_less_layers=less)
    case = Case(model=replace(MODEL, layers=layers), layout=layout, sequence_length=128)
    lengths = dealt(layers, stages, less)
    found = breaches(case)
    assert ("last_stage_less_layers" in {setting for setting, _ in found}) == (layers >= stages and lengths[-1] < 1)
    if not found:
        cut = stage_layers(layers, layout)
        assert [len(own) for own in cut] == lengths
        assert [layer for own in cut for layer in own] == [*range(layers)]


@given(
    st.sampled_from([*SCHEDULES.values(), V_SHAPED]), st.sampled_from([2, 3, 4, 8]), st.integers(1, 3),
    st.integers(1, 40), st.floats(0, 9),
)  # fmt: skip
def test_no_other_assignment_gives_the_slowest_rank_less(
    schedule: object, pp: int, vpp: int, layers: int, head: float
) -> None:
    assert hasattr(schedule, "placement")
    placement = schedule.placement(pp, min(max(vpp, schedule.min_vpp), schedule.max_vpp))  # type: ignore[attr-defined]
    stages = placement.pp * placement.vpp
    if layers < stages:
        assert balanced(layers, placement, head) == 0
        return
    best, slowest = 0, float("inf")
    for less in range(layers):
        lengths = dealt(layers, stages, less)
        costs = [sum(lengths[s] + head * (s == stages - 1) for s in own) for own in placement.stages]
        if lengths[-1] > 0 and max(costs) < slowest:
            best, slowest = less, max(costs)
    assert balanced(layers, placement, head) == best


@pytest.mark.parametrize(
    ("model", "sequence_length"), [("llama-3.1-8b", 8192), ("llama-3.2-1b", 4096), ("llama-3.1-405b", 8192)]
)
def test_the_head_counts_as_many_layers_as_its_products(model: str, sequence_length: int) -> None:
    """By the formulas of a dense decoder: 2 FLOPs a weight, and attention over the whole sequence."""
    m = preset(model).model
    attention = m.hidden_size * m.head_size * (2 * m.heads + 2 * m.kv_heads)
    layer = 2 * (attention + 3 * m.hidden_size * m.ffn_size) + 4 * sequence_length * m.heads * m.head_size
    assert head_in_layers(m, sequence_length) == pytest.approx(2 * m.hidden_size * m.vocab_size / layer, rel=1e-3)


def test_an_8b_model_on_two_ranks_is_17_and_15_layers() -> None:
    placement = Layout(pp=2).placement
    less = balanced(32, placement, head_in_layers(MODEL, 8192))
    assert [len(own) for own in stage_layers(32, Layout(pp=2, last_stage_less_layers=less))] == [17, 15]
