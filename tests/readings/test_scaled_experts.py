"""What experts in FP8 change of a price: their time in two of three phases, their workspace, and no other byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract.config.hardware import cluster
from penteract.config.layout import Elementwise, Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.fp8 import usual
from penteract.config.precision.policy import RECIPES
from penteract.ops.declarations.declaration import Product, ScaledBy
from penteract.readings.estimator import Estimator

LAYERS, D, F, X, K, TOKENS = 3, 2048, 1024, 8, 2, 4096
MODEL = ModelSpec(
    layers=LAYERS, hidden_size=D, heads=16, kv_heads=16, head_size=128, ffn_size=4096, vocab_size=1024,
    moe=MoESpec(experts=X, top_k=K, ffn_size=F),
)  # fmt: skip


def prices(kind: str, *, experts: bool) -> Estimator:
    fp8 = replace(usual(kind), experts=experts)  # type: ignore[arg-type]
    return Estimator(MODEL, cluster("1xH200"), TOKENS, replace(RECIPES["bf16"], fp8=fp8))


@pytest.mark.parametrize("elementwise", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["rowwise", "blockwise"])
def test_two_phases_of_three_are_at_the_speed_of_fp8(kind: str, elementwise: Elementwise) -> None:
    layout, told = Layout(elementwise=elementwise), dict[bool, tuple[float, int]]()
    for experts in (False, True):
        some = prices(kind, experts=experts)
        estimate = some.estimate(layout)
        time = some.time(estimate)
        assert estimate.at_least <= time.seconds
        told[experts] = time.parts["compute"], estimate.allocated
    rates, won, rows = prices(kind, experts=True).rates, 0.0, TOKENS * K
    by: ScaledBy = "blocks" if kind == "blockwise" else "tensors"
    readings = 1 if (kind, elementwise) == ("blockwise", "triton") else 2
    for n, k in ((F, D), (D, F)) * 3:  # gate, up and down, forward and back
        each = Product(X, rows // X, n, k)
        made = (rows + X * n) * k * (2 * readings + 1)
        won += rates.product(each) - rates.scaled(each, by) - rates.moved(made)
    # The clock counts in picoseconds: each of the calls is off by half of one at most, with experts and without.
    assert told[False][0] - told[True][0] == pytest.approx(LAYERS * won, rel=0, abs=LAYERS * 18e-12)


def test_what_is_kept_is_the_same() -> None:
    with_them, without = (prices("rowwise", experts=experts).estimate(Layout()).memory for experts in (True, False))
    assert {kind: n for kind, n in with_them.items() if kind != "other"} == {
        kind: n for kind, n in without.items() if kind != "other"
    }


def test_experts_that_are_cut_agree_on_their_scales() -> None:
    """Of the rows and all matrices of a rank, in forward of down and in the gradients of what gate and up are given."""
    layout, wires = Layout(tp=2, expert_tp=2), dict[bool, int]()
    for experts in (False, True):
        some = prices("rowwise", experts=experts)
        wires[experts] = some.composer.rank(layout, 0).redistributions["all_reduce", "tp"]
    assert wires[True] - wires[False] == LAYERS * 4 * 3 * (TOKENS * K + X * D)
