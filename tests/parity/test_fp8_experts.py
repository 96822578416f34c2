"""Experts in FP8 on layouts are one process with them: the same scales whichever tokens meet on a rank; and the price.

In float64 beside the data, as in `test_fp8`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from draws import further
from layouts import Case
from parity.test_fp8 import DENSE, alone, held, same_price
from penteract.config.layout import Layout
from penteract.config.model import MoESpec
from penteract.config.precision.fp8 import usual
from penteract.config.precision.policy import RECIPES, Policy
from pool import Pool
from precisions import patterns

STEERED = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=32, dense_layers=(0,), balance="bias"))
RECIPE = {
    "rowwise": replace(usual("rowwise"), experts=True),
    "blockwise": replace(usual("blockwise"), block=16, powers=True, experts=True),
}
PLACES = [
    Layout(dp=2, ep=2, zero=2, gradient_accumulation_steps=2),
    Layout(dp=2, tp=2, ep=2, expert_tp=2, recompute=("expert_linear",)),
    Layout(tp=2, expert_tp=2, zero=3, dp=2),
    Layout(dp=2, pp=3, ep=2, gradient_accumulation_steps=3, schedule="zb_h1"),
]


def policy(name: str) -> Policy:
    return replace(RECIPES["fp64"], fp8=RECIPE[name])


FEW = [(layout, [*RECIPE][i % 2]) for i, layout in enumerate(PLACES)]


@pytest.mark.parametrize(
    ("layout", "name"), [*FEW, *further(case for case in product(PLACES, RECIPE) if case not in FEW)], ids=str
)
def test_a_layout_is_one_process(pool: Pool, layout: Layout, name: str) -> None:
    told = pool.run(held, Case(STEERED, layout, 64, precision=policy(name)), {})
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


def test_scales_of_a_part_of_a_row_are_seen(pool: Pool) -> None:
    """Experts alone are in FP8, and no rank asks the others."""
    apart = replace(policy("rowwise"), modules=patterns("*:linears=fp64", "*.experts.*:linears=fp8"))
    case = Case(STEERED, PLACES[2], 64, precision=apart)
    assert not any(wrong for wrong in pool.run(held, case, {}))
    wrong = [w for some in pool.run(alone, case) for w in some if "is off by" in w]
    assert {name for name in ("gate", "up", "down") if any(f"experts.{name}" in w for w in wrong)}


@pytest.mark.parametrize("name", RECIPE)
@pytest.mark.parametrize("layout", PLACES, ids=str)
def test_a_price_without_a_walk_is_that_of_the_walk(name: str, layout: Layout) -> None:
    same_price(replace(STEERED, layers=4), layout, replace(RECIPES["bf16"], fp8=RECIPE[name]))
