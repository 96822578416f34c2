"""Muon over every layout is Muon in one process, and puts on wires, computes and allocates what it is priced at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from layouts import Case
from observe import Watched, Wires
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.optimizers import OptimizerKind, OptimizerKinds
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor.executor import Executor
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price, resident
from pool import Pool
from tiny import SIZES
from tolerances import PARITY
from training import train, trainer

MUON = OptimizerKinds(matrices=OptimizerKind("muon", 5))
STEPS = 3
DENSE = ModelSpec(**SIZES, qkv_bias=True)
TIED = replace(DENSE, layers=4, tied=True, norm="layer", mtp_layers=1)
EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24, score="sigmoid", balance="bias"))

LAYOUTS = [
    (DENSE, Layout(dp=4, bucket_bytes=2**12)),
    (DENSE, Layout(dp=2, tp=4, zero=1)),  # KV heads are replicated over pairs of tensor ranks
    (DENSE, Layout(dp=2, tp=4)),
    (DENSE, Layout(dp=4, zero=2, shard_group=2, gradient_accumulation_steps=1)),
    (TIED, Layout(dp=2, pp=2, gradient_accumulation_steps=2, zero=3)),
    (TIED, Layout(tp=2, pp=2, cp=2, gradient_accumulation_steps=4, schedule="zb_h1", zero=1)),
    (EXPERTS, Layout(dp=4, ep=2, zero=3, shard_group=2)),
    (EXPERTS, Layout(dp=2, tp=2, ep=2, expert_tp=2, zero=1)),
    (EXPERTS, Layout(dp=2, cp=2, ep=4, tp=2)),
]


@dataclass
class Told:
    """What a rank found: its master weights and momenta, each a slice of a global tensor; and where its price is
    wrong."""

    values: dict[tuple[str, str], tuple[Any, int, torch.Tensor]]
    differences: list[str]


def trained(rank: int, groups: ProcessGroups, case: Case) -> Told:
    """`STEPS` of Muon; the first is held against its price."""
    p = case.compile(rank)
    groups.make(needed(p))
    run = trainer(case, p, groups)
    wires, watched, seen = Wires(p.rank), Watched(), list[str]()
    steps = train(run, STEPS)
    with wires.watch(), watched:
        next(steps)
    priced = price(p, Recorded(run.received), targets_counted=False)
    for key in sorted({*priced.wires, *wires.bytes}):
        if priced.wires[key] != wires.bytes[key]:
            seen.append(f"{key}: priced {priced.wires[key]}, seen {wires.bytes[key]}")
    if priced.total_flops != watched.flops:
        seen.append(f"FLOPs: priced {priced.total_flops}, counted {watched.flops}")
    held = sum(size for kind, size in resident(p).items() if kind != "data")
    if held != bytes_of(t for t in run.state.resident()):
        seen.append(f"holds {bytes_of(run.state.resident())}, priced {held}")
    list(steps)
    return Told(_values(run), seen)


def _values(run: Executor) -> dict[tuple[str, str], tuple[Any, int, torch.Tensor]]:
    out = dict[tuple[str, str], tuple[Any, int, torch.Tensor]]()
    for kind in ("master", "momentum", "mean", "square"):
        for part in run.state.parameter_parts(kind):
            q = part.param
            cut = tuple(zip(q.offset(run.p.mesh, run.p.rank), q.local_shape(run.p.mesh), strict=True))
            out[kind, q.name] = (cut, part.begin, part.values)
    return out


def lone(case: Case) -> Case:
    """The same batches in one process."""
    return replace(case, layout=Layout(micro_batch_size=case.layout.global_batch_size))


@pytest.fixture(scope="module")
def known() -> dict[Case, Told]:
    """What one process has found."""
    return {}


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_layout_is_one_process_and_its_price(
    pool: Pool, known: dict[Case, Told], model: ModelSpec, layout: Layout
) -> None:
    case = Case(model, layout, optimizer_kinds=MUON)
    if lone(case) not in known:
        known[lone(case)] = pool.run(trained, lone(case))[0]
    alone, shapes = known[lone(case)], {q.name: q.shape for q in case.compile(0).everything}
    assert alone.differences == []
    for rank, told in enumerate(pool.run(trained, case)):
        assert told.differences == [], rank
        for key, (cut, begin, values) in told.values.items():
            whole = alone.values[key][2].view(shapes[key[1]])
            for dim, (at, n) in enumerate(cut):
                whole = whole.narrow(dim, at, n)
            expected = whole.reshape(-1)[begin : begin + len(values)]
            error = (values - expected).abs().max() / whole.abs().max().clamp(min=1e-3)
            assert error < PARITY, (rank, key, error)
