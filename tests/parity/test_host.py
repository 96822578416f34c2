"""What lies on the host, or is made again, changes no bit of a step, and takes the bytes that its price says."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from layouts import CPU, Case, _prepare
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.device import Cpu
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.registry import kernels
from penteract.engine.optim.optimizer import AdamW
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price
from penteract.step import update
from penteract.step.program import Program
from penteract.step.walk import walk
from pool import Pool
from precisions import POLICIES, differ, kept, patterns
from strategies import cases, recomputes
from tiny import SIZES

DENSE = ModelSpec(**SIZES, tied=True)
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=24, dense_layers=(0,), balance="bias"))
INT8_MOMENTS = replace(RECIPES["bf16"], moments="int8", modules=patterns("embedding*:moments=fp32"))
PLACES: list[tuple[ModelSpec, Layout, str | Policy]] = [
    (DENSE, Layout(dp=4), "bf16"),
    (EXPERTS, Layout(dp=2, tp=2, ep=2, zero=1, bucket_bytes=2**12), INT8_MOMENTS),
    (DENSE, Layout(dp=4, zero=2), POLICIES["bf16_pure"]),
    (DENSE, Layout(dp=2, pp=2, zero=3, gradient_accumulation_steps=2, schedule="zb_h1"), "fp32"),
    (EXPERTS, Layout(dp=4, zero=3, shard_group=2, recompute=("*",), offload=("layer_inputs",)), "fp16"),
]
SLICE = 512  # elements: shards have several


class Counted(Cpu):
    """A device that counts what it copies."""

    total = 0

    def copy(self, x: torch.Tensor, y: torch.Tensor):  # type: ignore[no-untyped-def]
        Counted.total += y.nbytes
        return Cpu.copy(self, x, y)


def trained(p: Program, groups: ProcessGroups, steps: int) -> tuple[Executor, list[torch.Tensor]]:
    """A few steps with updates, and all that was left at the end: gradients and totals too."""
    run = _prepare(p, groups, kernels(p, CPU))
    counts = run.counts.clone()
    run.optimizer = AdamW(Optimizer(learning_rate=3e-3, weight_decay=0.1), CPU, 0, run.state.scaling)
    run.optimizer.rate.fill_(3e-3)
    for step in range(steps):
        run.optimizer.step.fill_(step + 1)
        run.counts.copy_(counts)
        walk(p, run, targets_counted=False)
    run.settle_parameters()
    gradients = [q.values.clone().view(torch.uint8) for q in run.state.parameter_parts("gradient")]
    whole = not any(f.bucket.cut_parameters for f in run.state.flats)
    return run, [*kept(run.state, whole=whole), *gradients, run.totals.view(torch.uint8)]


def optimizer_on_host(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    """What is wrong on this rank."""
    lay = case.layout
    there, here = (replace(case, layout=replace(lay, offload_optimizer=on)).compile(rank) for on in (True, False))
    groups.make(needed(there))
    _, want = trained(here, groups, 3)
    wrong = list[str]()
    with (
        patch.object(update, "SLICE", SLICE),
        patch("penteract.engine.executor.executor.device_of", lambda at: Counted()),
    ):
        Counted.total = 0
        run, seen = trained(there, groups, 3)
        priced, without = price(there, Recorded(run.received)), price(here, Recorded(run.received))
        slices = sum(ceil(b.shard_size / SLICE) for b in there.buckets)
        if slices < 4 or len(run.state.staging) != update.STAGING:
            wrong.append(f"{slices} slices, {len(run.state.staging)} staging buffers: too few to say anything")
        for what, told, found in (
            ("copied", 3 * sum(priced.copied.values()), Counted.total),
            ("resident", sum(priced.resident.values()) - priced.resident["data"], bytes_of(run.state.resident())),
            ("host", priced.host - without.host, bytes_of(run.state.on_host())),
            ("there and back", priced.copied["to_host"], priced.copied["from_host"]),
            ("as much", priced.host - without.host, without.resident["optimizer"]),
        ):
            if told != found:
                wrong.append(f"{what}: priced {told}, found {found}")
    if priced.resident["optimizer"] >= without.resident["optimizer"]:
        wrong.append("no byte was spared")
    return wrong + [f"buffer {i} differs" for i in differ(seen, want)]


@pytest.mark.parametrize(("model", "layout", "precision"), PLACES, ids=str)
def test_an_optimizer_on_the_host_moves_the_same_bits(
    pool: Pool, model: ModelSpec, layout: Layout, precision: str | Policy
) -> None:
    told = pool.run(optimizer_on_host, Case(model, layout, precision=precision))
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


def edited(rank: int, groups: ProcessGroups, case: Case, more: dict[str, object]) -> list[str]:
    """Where a step with these edits differs from one that keeps everything on the device."""
    lay = case.layout
    plain = replace(
        lay, recompute=(), recompute_every=1, recompute_first=0, recompute_else=(), offload=(), offload_every=1
    )
    p, q = (replace(case, layout=some).compile(rank) for some in (replace(plain, **more), plain))  # type: ignore[arg-type]
    groups.make(needed(p))
    _, want = trained(q, groups, 1)
    with patch("penteract.engine.executor.executor.device_of", lambda at: Counted()):
        Counted.total = 0
        run, seen = trained(p, groups, 1)
    copied = sum(price(p, Recorded(run.received)).copied.values())
    wrong = [] if copied == Counted.total else [f"copied: priced {copied}, found {Counted.total}"]
    return wrong + [f"buffer {i} of {len(want)} differs" for i in differ(seen, want)]


@draws(2, wide=25)
@given(case=cases(max_ranks=8), more=recomputes(), precision=st.sampled_from(["fp64", "fp32", "bf16"]))
def test_what_is_made_again_or_comes_back_is_the_same(
    pool: Pool, case: Case, more: dict[str, object], precision: str
) -> None:
    case = replace(case, precision=precision)
    told = pool.run(edited, case, more)
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == [], (case, more)
