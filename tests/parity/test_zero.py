"""ZeRO stage 1 is the same training: shards of any layout, and the same parameters after several steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layouts import CPU, Case, run_case
from penteract.engine.bodies.reference import REFERENCE
from penteract.engine.comm.comm import Comm
from penteract.engine.comm.groups import Groups, needed
from penteract.engine.feed import constants, micro_batch, samples_of, target_count
from penteract.engine.memory import Fresh
from penteract.engine.optimizer import AdamW
from penteract.engine.run import Run
from penteract.engine.state import allocate, initialise
from penteract.spec.layout import Layout
from penteract.spec.model import ModelSpec, MoESpec
from penteract.spec.run import Optimizer
from penteract.step.walk import walk
from pool import Pool
from samples import sample
from tiny import SIZES

DENSE = ModelSpec(**SIZES, qkv_bias=True)
TIED = ModelSpec(**SIZES, tied=True, norm="layer")
EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24, score="sigmoid", balance="bias"))

LAYOUTS = [
    (DENSE, Layout(dp=3, zero=1, bucket_bytes=0)),  # every shard of a bias is mostly padding
    (DENSE, Layout(dp=2, tp=4, zero=1)),  # KV heads are replicated over pairs of tensor ranks
    (TIED, Layout(dp=2, pp=2, gradient_accumulation_steps=2, zero=1, bucket_bytes=2**12)),
    (DENSE, Layout(cp=2, pp=2, gradient_accumulation_steps=2, schedule="zb_h1", context_method="ring", zero=1)),
    (EXPERTS, Layout(dp=4, ep=2, zero=1, bucket_bytes=2**12)),
    (EXPERTS, Layout(dp=2, tp=2, ep=2, expert_tp=2, zero=1)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_shards_are_one_process_and_their_price(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    length = 24 if layout.dp == 3 else 16
    verdicts = pool.run(run_case, Case(model, layout, sequence_length=length))
    assert not [f"rank {rank}: {v}" for rank, v in enumerate(verdicts) if v is not None and v.red]


def trained(rank: int, groups: Groups, case: Case, steps: int) -> dict[str, torch.Tensor] | None:
    """This rank's parameters after `steps` of AdamW in float64; None beyond the layout's ranks."""
    p = case.compile(rank % case.layout.world)
    groups.make(needed(p))
    if rank >= case.layout.world:
        return None
    state = allocate(p, CPU)
    initialise(p, state, 0)
    optimizer = AdamW(Optimizer(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5), CPU)
    optimizer.rate.fill_(1e-2)
    run = Run(p, state, Comm(groups, p.rank), REFERENCE, Fresh("fp64", CPU), optimizer)
    for step in range(steps):
        optimizer.step.fill_(step + 1)
        first = step * case.layout.global_batch_size
        mine = [[sample(i, p.sequence_length, p.model.vocab_size) for i in ids] for ids in samples_of(p, first)]
        run.batches = [constants(p, CPU) | micro_batch(p, samples, CPU) for samples in mine]
        run.counts.fill_(sum(target_count(samples) for samples in mine))
        walk(p, run)
    for flat in state.flats:  # padding is no parameter and stays what it was
        used = sum(q.numel(p.mesh) for q in flat.bucket.params)
        assert not flat.parameter[used:].any()
    return state.parameters


@pytest.mark.parametrize("layout", [Layout(dp=4, bucket_bytes=2**13), Layout(dp=2, tp=2)], ids=str)
def test_several_steps_move_parameters_as_without_shards(pool: Pool, layout: Layout) -> None:
    whole, cut = (pool.run(trained, Case(EXPERTS, replace(layout, zero=zero)), 4)[: layout.world] for zero in (0, 1))
    start = pool.run(trained, Case(EXPERTS, layout), 0)[0]
    assert any((whole[0][n] - t).abs().max() > 1e-2 for n, t in start.items())
    for one, other in zip(whole, cut, strict=True):
        assert max((one[n] - other[n]).abs().max().item() for n in one) < 1e-12
