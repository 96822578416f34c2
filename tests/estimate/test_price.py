"""What a price says of itself: the arena holds what lives, fits means what it says, refusals name the cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penteract import Cluster, Layout, ModelSpec, MoESpec, estimate
from penteract.engine.state import allocate
from penteract.engine.storages import bytes_of
from penteract.errors import BadInput
from penteract.estimate.price import price, resident
from penteract.parallel.data import UNIT
from penteract.spec.precision import RECIPES, Policy
from penteract.step.program import compile_step

DENSE = ModelSpec(layers=4, hidden_size=64, heads=8, kv_heads=4, head_size=8, ffn_size=128, vocab_size=128)
EXPERTS = ModelSpec(
    layers=4, hidden_size=64, heads=8, kv_heads=4, head_size=8, ffn_size=128, vocab_size=128,
    moe=MoESpec(experts=8, top_k=2, ffn_size=256),
)  # fmt: skip
CODED = replace(RECIPES["bf16"], moments="int8")
LAYOUTS = [
    Layout(),
    Layout(tp=4, micro_batch_size=2),
    Layout(pp=4, gradient_accumulation_steps=8),
    Layout(cp=2, tp=2, context_method="ring"),
    Layout(dp=8, ep=8, micro_batch_size=4),
    Layout(dp=4, pp=2, ep=4, gradient_accumulation_steps=4, schedule="zb_h1"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_allocates_no_less_than_what_lives(layout: Layout) -> None:
    for model in (DENSE, EXPERTS) if layout.ep == 1 else (EXPERTS,):
        for rank in range(layout.world):
            p = price(compile_step(model, layout, 64, rank=rank))
            assert p.live <= p.allocated <= 2 * p.live


@pytest.mark.parametrize("layout", [*LAYOUTS[:4], *(replace(lay, zero=1) for lay in LAYOUTS)], ids=str)
@pytest.mark.parametrize(
    "precision", ["fp64", "bf16", "bf16_pure", "fp16", replace(RECIPES["bf16"], moments="int8")], ids=str
)
def test_what_stays_is_what_is_allocated(layout: Layout, precision: str | Policy) -> None:
    model = replace(EXPERTS, tied=True, norm="layer", vocab_size=72)
    for rank in {0, layout.world - 1}:
        p = compile_step(model, layout, 64, rank=rank, precision=precision)
        flats = allocate(p, torch.device("cpu")).flats
        kept, bound = resident(p), bytes_of(f.parameter for f in flats)
        assert kept["parameters"] == bound
        assert kept["gradients"] == bytes_of(f.gradient for f in flats)
        own = (t for f in flats for t in (f.parameter, f.master, *f.averages.values(), *f.scales.values()))
        assert kept["optimizer"] == bytes_of(own) - bound


def test_shards_share_what_the_optimizer_keeps() -> None:
    """Adam in bf16 keeps 12 bytes an element: over d ranks each has 12/d (Rajbhandari 2019, 1910.02054, §5.1)."""
    layouts = (Layout(dp=8), Layout(dp=8, zero=1))
    whole, cut = (price(compile_step(DENSE, lay, 64, precision="bf16")) for lay in layouts)
    elements = whole.resident["parameters"] // 2
    padding = len(compile_step(DENSE, layouts[1], 64).buckets) * 8 * UNIT
    assert whole.resident["optimizer"] == 12 * elements
    assert 0 <= cut.resident["optimizer"] - 12 * elements / 8 <= 12 * padding / 8
    group = tuple(range(8))
    assert whole.wires["all_reduce", group] - cut.wires["all_reduce", group] == 4 * elements
    assert 0 <= cut.wires["reduce_scatter", group] - 4 * elements <= 4 * padding
    assert 0 <= cut.wires["all_gather", group] - 2 * elements <= 2 * padding


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


def test_refusals() -> None:
    with pytest.raises(BadInput, match=r"LAYOUT.*tp = 3"):
        estimate(DENSE, Layout(tp=3), sequence_length=64)
    with pytest.raises(BadInput, match="PRECISION"):
        estimate(DENSE, Layout(), precision="fp3")
