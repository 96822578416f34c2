"""ZeRO is the same training at every stage: shards of any layout, the same parameters after several steps, and no more
memory than its shards and rings."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from draws import further
from layouts import Case, run_case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.storages import Storages
from pool import Pool
from tiny import SIZES
from training import train, trainer, whole

DENSE = ModelSpec(**SIZES, qkv_bias=True)
TIED = ModelSpec(**SIZES | {"layers": 4}, tied=True, norm="layer")
DEEP = replace(DENSE, layers=5)
AHEAD = replace(DENSE, mtp_layers=1)
EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24, score="sigmoid", balance="bias"))

LAYOUTS = [
    (DENSE, Layout(dp=3, zero=1, bucket_bytes=0)),  # every shard of a bias is mostly padding
    (DENSE, Layout(dp=2, tp=4, zero=1)),  # KV heads are replicated over pairs of tensor ranks
    (DENSE, Layout(cp=2, pp=2, gradient_accumulation_steps=2, schedule="zb_h1", cp_method="ring", zero=1)),
    (EXPERTS, Layout(dp=2, tp=2, ep=2, expert_tp=2, zero=1)),
    (DENSE, Layout(dp=4, gradient_accumulation_steps=2, zero=1, shard_group=2, bucket_bytes=2**12)),
    (DENSE, Layout(dp=2, tp=4, gradient_accumulation_steps=2, zero=3)),
    (AHEAD, Layout(dp=4, gradient_accumulation_steps=3, zero=3, shard_group=2, recompute=("*",))),
    (
        TIED,
        Layout(
            dp=2,
            pp=2,
            gradient_accumulation_steps=3,
            zero=3,
            schedule="zb_h1",
            recompute=("tp_all_gather", "layer_norm"),
        ),
    ),
    (TIED, Layout(dp=2, pp=2, vpp=2, gradient_accumulation_steps=4, zero=3, schedule="interleaved")),
    (DEEP, Layout(dp=2, cp=2, gradient_accumulation_steps=3, zero=3, schedule="gpipe", reduce_scatter_once=True)),
    (DEEP, Layout(dp=2, pp=2, cp=2, gradient_accumulation_steps=3, zero=3, shard_group=2, reshard_after_step=True)),
    (EXPERTS, Layout(dp=4, ep=2, gradient_accumulation_steps=2, schedule="zb_h1", zero=3, shard_group=2)),
    (EXPERTS, Layout(dp=4, ep=4, tp=2, gradient_accumulation_steps=2, zero=2, shard_group=2)),
    (DENSE, Layout(dp=3, gradient_accumulation_steps=2, zero=2, bucket_bytes=2**12)),
]
FURTHER = [  # the stages above, with other schedules and other experts
    (TIED, Layout(dp=2, pp=2, gradient_accumulation_steps=2, zero=1, bucket_bytes=2**12)),
    (EXPERTS, Layout(dp=4, ep=2, zero=1, bucket_bytes=2**12)),
]


@pytest.mark.parametrize(("model", "layout"), [*LAYOUTS, *further(FURTHER)], ids=str)
def test_shards_are_one_process_and_their_price(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    length = 24 if layout.dp == 3 else 16
    verdicts = pool.run(run_case, Case(model, layout, sequence_length=length))
    assert not [f"rank {rank}: {v}" for rank, v in enumerate(verdicts) if v.red]


def trained(rank: int, groups: ProcessGroups, case: Case, steps: int) -> dict[str, torch.Tensor]:
    """This rank's parameters after `steps` of AdamW in float64."""
    p = case.compile(rank)
    groups.make(needed(p))
    run = trainer(case, p, groups)
    list(train(run, steps))
    return whole(run)


STEPS = [
    (Layout(dp=4, bucket_bytes=2**13), [{"zero": 1}, {"zero": 3}, {"zero": 2, "shard_group": 2}]),
    (Layout(dp=2, tp=2, gradient_accumulation_steps=2), [{"zero": 1}, {"zero": 3, "reshard_after_step": True}]),
    (Layout(dp=2, pp=2, gradient_accumulation_steps=3), [{"zero": 2}, {"zero": 3, "reduce_scatter_once": True}]),
]


@pytest.mark.parametrize(("layout", "cuts"), STEPS, ids=str)
def test_several_steps_move_parameters_as_without_shards(
    pool: Pool, layout: Layout, cuts: list[dict[str, Any]]
) -> None:
    uncut = pool.run(trained, Case(EXPERTS, layout), 4)
    start = pool.run(trained, Case(EXPERTS, layout), 0)[0]
    assert any((uncut[0][n] - t).abs().max() > 1e-2 for n, t in start.items())
    for cut in cuts:
        ranks = pool.run(trained, Case(EXPERTS, replace(layout, **cut)), 4)
        for one, other in zip(uncut, ranks, strict=True):
            assert max((one[n] - other[n]).abs().max().item() for n in one) < 1e-12, cut


def lasting(rank: int, groups: ProcessGroups, case: Case) -> int:
    """Bytes of all storages that are alive after two steps of a rank, but its data."""
    p = case.compile(rank)
    groups.make(needed(p))
    with Storages() as storages:
        run = trainer(case, p, groups)
        list(train(run, 2))
        run.settle_parameters()
        run.micro_batches = []
        gc.collect()
        return storages.now


@pytest.mark.parametrize("keep", [False, True])
def test_no_whole_parameters_stay_beside_shards_and_rings(pool: Pool, keep: bool) -> None:
    """Six layers over four ranks, counted by hand: four buffers of shards, and two places of the largest unit."""
    model = ModelSpec(**SIZES | {"layers": 6, "vocab_size": 8})
    layer, end = 32 * (32 + 2 * 8 + 32 + 3 * 64) + 2 * 32, 8 * 32
    everything = 6 * layer + 2 * end + 32
    layout = Layout(dp=4, gradient_accumulation_steps=2, zero=3, reshard_after_step=keep)
    for found in pool.run(lasting, Case(model, layout)):
        rings = (everything if keep else 2 * layer) + 2 * layer
        assert 0 <= found / 8 - (everything + rings) < 700  # elements: padding, and the run's few scalars
