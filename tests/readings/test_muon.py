"""Muon's price by hand: what it keeps, sends and computes, and how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.readings.estimator import Estimator
from penteract.readings.price import Price, price
from penteract.step.program import compile_step

MUON = OptimizerKinds(matrices=OptimizerKind("muon", 5))
D, F, L, V = 256, 1024, 4, 512
MODEL = ModelSpec(layers=L, hidden_size=D, heads=8, kv_heads=8, head_size=D // 8, ffn_size=F, vocab_size=V)
MATRICES = L * (4 * D * D + 3 * D * F)  # elements
# X·Xᵀ, its square, and that times X, five times, at two FLOPs a multiply-add; D is the short side of all.
FLOPS = L * 5 * 2 * (4 * (2 * D**3 + D**3) + 3 * (2 * D * D * F + D**3))


def priced(layout: Layout, optimizer_kinds: OptimizerKinds = MUON, rank: int = 0) -> Price:
    return price(compile_step(MODEL, layout, 64, rank=rank, precision="bf16", optimizer_kinds=optimizer_kinds))


def test_a_matrix_has_one_average() -> None:
    """A master and one average of four bytes each, where AdamW has two."""
    plain, muon = (priced(Layout(), optimizer_kinds).resident["optimizer"] for optimizer_kinds in (PLAIN, MUON))
    assert plain - muon == 4 * MATRICES


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_share_the_products(zero: int) -> None:
    layout = Layout(dp=4, zero=zero)
    each = [priced(layout, rank=r).flops["update"] for r in range(4)]
    assert sum(each) == FLOPS == priced(Layout()).flops["update"]
    assert max(each) < 0.5 * FLOPS  # a layer has seven matrices, three of them large


def test_tensor_ranks_do_alike() -> None:
    """Each has all products, and a matrix goes over tp once."""
    plain, muon = (priced(Layout(tp=2), optimizer_kinds) for optimizer_kinds in (PLAIN, MUON))
    assert muon.flops["update"] == FLOPS
    more = {wire: n - plain.wires[wire] for wire, n in muon.wires.items() if n != plain.wires[wire]}
    assert more == {("all_gather", (0, 1)): 2 * MATRICES}


def test_shards_gather_and_sum_a_bucket_in_bf16() -> None:
    plain, muon = (
        priced(Layout(dp=2, zero=1, bucket_bytes=2**30), optimizer_kinds) for optimizer_kinds in (PLAIN, MUON)
    )
    for kind in ("all_gather", "reduce_scatter"):
        assert 0 <= muon.wires[kind, (0, 1)] - plain.wires[kind, (0, 1)] - 2 * MATRICES < 2**10  # padding


@pytest.mark.parametrize("layout", [
    Layout(dp=8, zero=1), Layout(dp=4, tp=2), Layout(dp=4, pp=2, zero=3, gradient_accumulation_steps=4),
    Layout(dp=8, zero=2, shard_group=4),
], ids=str)  # fmt: skip
def test_an_update_takes_longer_and_the_bound_stays_one(layout: Layout) -> None:
    large = replace(MODEL, hidden_size=2048, ffn_size=8192, head_size=256)
    took = list[float]()
    for optimizer_kinds in (PLAIN, MUON):
        estimator = Estimator(large, cluster("8xH200"), 2048, optimizer_kinds=optimizer_kinds)
        estimate = estimator.estimate(layout)
        time = estimator.time(estimate)
        assert estimate.at_least <= time.seconds * (1 + 1e-9)
        took.append(time.parts["update"])
    assert took[0] < took[1]


def test_larger_buckets_keep_more_ranks_at_work() -> None:
    """A bucket of one matrix has one rank at work and seven that wait."""
    large = replace(MODEL, hidden_size=2048, ffn_size=8192, head_size=256)
    estimator = Estimator(large, cluster("8xH200"), 2048, optimizer_kinds=MUON)
    layouts = (Layout(dp=8, zero=1, bucket_bytes=size) for size in (0, 2**32))
    one, many = (estimator.time(estimator.estimate(layout)).parts["update"] for layout in layouts)
    assert many < one / 3
