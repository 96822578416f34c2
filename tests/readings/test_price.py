"""What a price says of itself: the arena holds what lives, fits means what it says, refusals name the cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penteract import Cluster, Layout, ModelSpec, MoESpec, estimate, plan
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.device.storages import bytes_of
from penteract.engine.state.state import allocate
from penteract.errors import BadInput
from penteract.parallel.data import SHARD_MULTIPLE
from penteract.readings.price import price, resident
from penteract.step.program import compile_step

DENSE = ModelSpec(layers=4, hidden_size=64, heads=8, kv_heads=4, head_size=8, ffn_size=128, vocab_size=128)
EXPERTS = ModelSpec(
    layers=4, hidden_size=64, heads=8, kv_heads=4, head_size=8, ffn_size=128, vocab_size=128,
    moe=MoESpec(experts=8, top_k=2, ffn_size=256),
)  # fmt: skip
AWAY = Layout(dp=4, pp=2, ep=4, gradient_accumulation_steps=4, zero=3, offload_optimizer=True)
INT8_MOMENTS = replace(RECIPES["bf16"], moments="int8")
LAYOUTS = [
    Layout(),
    Layout(tp=4, micro_batch_size=2),
    Layout(pp=4, gradient_accumulation_steps=8),
    Layout(cp=2, tp=2, cp_method="ring"),
    Layout(dp=8, ep=8, micro_batch_size=4),
    Layout(dp=4, pp=2, ep=4, gradient_accumulation_steps=4, schedule="zb_h1"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_allocates_no_less_than_what_lives(layout: Layout) -> None:
    for model in (DENSE, EXPERTS) if layout.ep == 1 else (EXPERTS,):
        for rank in range(layout.world):
            p = price(compile_step(model, layout, 64, rank=rank))
            assert p.live <= p.allocated <= 2 * p.live


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[:4], *(replace(lay, zero=z) for lay in LAYOUTS for z in (1, 2, 3)), AWAY],
    ids=str,
)
@pytest.mark.parametrize(
    "precision", ["fp64", "bf16", "bf16_pure", "fp16", replace(RECIPES["bf16"], moments="int8")], ids=str
)
def test_what_stays_is_what_is_allocated(layout: Layout, precision: str | Policy) -> None:
    model = replace(EXPERTS, tied=True, norm="layer", vocab_size=72)
    for rank in {0, layout.world - 1}:
        p = compile_step(model, layout, 64, rank=rank, precision=precision)
        state = allocate(p, torch.device("cpu"))
        flats, kept = state.flats, resident(p)
        whole = [f for f in flats if not f.bucket.cut_parameters]
        bound = bytes_of([*(f.parameter for f in whole), *(f.own_parameter for f in flats)])
        assert kept["parameters"] == bound
        summed = [f for f in flats if not f.bucket.cut_gradients]
        assert kept["gradients"] == bytes_of([*(f.gradient for f in summed), *(f.own_gradient for f in flats)])
        assert kept.get("ring_buffer", 0) == bytes_of(state.ring_buffers)
        assert sum(kept.values()) - kept["data"] == bytes_of(state.resident())
        own = [t for f in flats for t in (f.own_parameter, f.master, *f.moments.values(), *f.scales.values())]
        optimizer = bytes_of([*(f.parameter for f in whole), *own]) - bound
        if layout.offload_optimizer:
            assert price(p).host == bytes_of(state.on_host()) == optimizer
            optimizer = bytes_of(t for place in state.staging for t in place.values())
        assert kept["optimizer"] == optimizer


def test_shards_share_what_the_optimizer_keeps() -> None:
    """Adam in bf16 keeps 12 bytes an element: over d ranks each has 12/d (Rajbhandari 2019, 1910.02054, §5.1). Split
    master weights need 2 less."""
    layouts, precision = (Layout(dp=8), Layout(dp=8, zero=1)), replace(RECIPES["bf16"], master="fp32")
    whole, cut = (price(compile_step(DENSE, lay, 64, precision=precision)) for lay in layouts)
    elements = whole.resident["parameters"] // 2
    padding = len(compile_step(DENSE, layouts[1], 64).buckets) * 8 * SHARD_MULTIPLE
    assert whole.resident["optimizer"] == 12 * elements
    split = price(compile_step(DENSE, layouts[0], 64, precision="bf16"))
    assert split.resident == whole.resident | {"optimizer": 10 * elements}
    assert 0 <= cut.resident["optimizer"] - 12 * elements / 8 <= 12 * padding / 8
    group = tuple(range(8))
    assert whole.wires["all_reduce", group] - cut.wires["all_reduce", group] == 4 * elements
    assert 0 <= cut.wires["reduce_scatter", group] - 4 * elements <= 4 * padding
    assert 0 <= cut.wires["all_gather", group] - 2 * elements <= 2 * padding


def test_further_stages_share_gradients_and_parameters() -> None:
    """4 bytes of gradients and 2 of parameters an element: each divided by d ranks (the same paper, §5.2 and §5.3)."""
    told = {z: price(compile_step(DENSE, Layout(dp=8, zero=z), 64, precision="bf16")).resident for z in (1, 2, 3)}
    elements, padding = 2 * 128 * 64 + 4 * LAYER + 64, 12 * 8 * SHARD_MULTIPLE
    for z, kind, bytes_ in ((2, "gradients", 4), (3, "gradients", 4), (3, "parameters", 2)):
        assert 0 <= told[z][kind] - bytes_ * elements / 8 <= bytes_ * padding / 8
    for z, kind, bytes_ in ((1, "gradients", 4), (2, "parameters", 2)):
        assert 0 <= told[z][kind] - bytes_ * elements <= bytes_ * padding
    places = 2 * LAYER  # the largest unit is a layer
    assert "ring_buffer" not in told[1]
    assert 0 <= told[2]["ring_buffer"] - 4 * places <= 4 * 2 * padding
    assert 0 <= told[3]["ring_buffer"] - (4 + 2) * places <= 6 * 2 * padding


LAYER = 64 * (64 + 2 * 32 + 64 + 3 * 128) + 2 * 64  # elements of a layer of DENSE


def test_gathers_of_three_micro_batches_by_hand() -> None:
    """Two places, six units. A micro-batch gathers all six on its way there but those that still lie in a place, and
    the layers 2, 1, 0 on its way back: the head and the layer before it are still there, and the embedding is not read.
    The next one finds layer 0 there."""
    layout, group = Layout(dp=8, zero=3, gradient_accumulation_steps=3), tuple(range(8))
    units = {"embedding": 3, 0: 1 + 3, 1: 3 + 3, 2: 3 + 3, 3: 3, "head": 3}
    elements = 128 * 64 * 3 + LAYER * (4 + 6 + 6 + 3) + (128 * 64 + 64) * 3
    priced = price(compile_step(DENSE, layout, 64, precision="bf16"))
    assert 0 <= priced.wires["all_gather", group] - 2 * elements <= 2 * sum(units.values()) * 2 * 8 * SHARD_MULTIPLE
    once = price(compile_step(DENSE, replace(layout, reshard_after_step=True), 64, precision="bf16"))
    assert once.wires["all_gather", group] == once.resident["parameters"] * 8
    summed = price(compile_step(DENSE, replace(layout, reduce_scatter_once=True), 64, precision="bf16"))
    assert priced.wires["reduce_scatter", group] == 3 * summed.wires["reduce_scatter", group]


def test_groups_hold_more_and_sum_what_they_hold_over_replicas() -> None:
    """HSDP: shards of half as many ranks are twice as large, and each is summed once a step over its replicas."""
    all_of_them, half = (
        price(compile_step(DENSE, Layout(dp=8, zero=3, shard_group=n, gradient_accumulation_steps=2), 64))
        for n in (0, 4)
    )
    for kind in ("parameters", "gradients", "optimizer"):
        assert half.resident[kind] == pytest.approx(2 * all_of_them.resident[kind], rel=0.02)
    assert half.wires["all_reduce", (0, 4)] == half.resident["gradients"]
    assert half.wires["reduce_scatter", (0, 1, 2, 3)] == 2 * 4 * half.resident["gradients"]


def test_splitting_over_tensor_ranks_shares_the_work() -> None:
    one, four = (estimate(DENSE, Layout(tp=n), sequence_length=64) for n in (1, 4))
    assert one.flops == four.flops
    assert four.memory_gib["parameters"] < one.memory_gib["parameters"] / 3
    assert one.tokens == 64


def test_a_layout_fits_where_there_are_devices_and_memory_for_it() -> None:
    layout = Layout(tp=4)
    assert estimate(DENSE, layout, sequence_length=64).fits is None
    assert estimate(DENSE, layout, Cluster(gpus=4, memory_gib=80), sequence_length=64).fits is True
    assert estimate(DENSE, layout, Cluster(gpus=2, memory_gib=80), sequence_length=64).fits is False
    assert estimate(DENSE, layout, Cluster(gpus=4, memory_gib=1e-4), sequence_length=64).fits is False


def test_what_fits_is_what_the_planner_says() -> None:
    """Between usable memory and all of it a layout does not fit; both have one default precision."""
    found = plan(replace(DENSE, max_positions=64), "8xH200", sequence_length=64, batch="8seqs", layout="dp=8,zero=1")
    best = found.best
    alike = estimate(found.ask.model, best.layout, found.ask.cluster, sequence_length=64)
    assert (alike.allocated, alike.fits) == (best.estimate.allocated, found.fits(best.estimate)) and alike.fits
    nearly = Cluster(gpus=8, memory_gib=alike.allocated_gib / 0.95)
    assert estimate(found.ask.model, best.layout, nearly, sequence_length=64).fits is False
    assert not replace(found, ask=replace(found.ask, cluster=nearly)).fits(best.estimate)
    assert estimate(found.ask.model, best.layout, nearly, sequence_length=64, headroom=0.04).fits


def test_refusals() -> None:
    with pytest.raises(BadInput, match=r"LAYOUT.*tp = 3"):
        estimate(DENSE, Layout(tp=3), sequence_length=64)
    with pytest.raises(BadInput, match="PRECISION"):
        estimate(DENSE, Layout(), precision="fp3")
