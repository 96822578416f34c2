"""What PyTorch's FSDP2 makes of the same model, data and optimizer is what ZeRO 2 and 3 make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import oracle
from layouts import Case
from observe import Wires
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.groups import ProcessGroups, Round, needed
from penteract.parallel.data import SHARD_MULTIPLE
from pool import Pool
from samples import sample, stacked
from tiny import SIZES
from training import OPTIMIZER, train, trainer, whole

DENSE = ModelSpec(**SIZES, qkv_bias=True)


class Part(nn.Module):
    """Parameters that FSDP2 gathers together."""

    def __init__(self, w: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names, self.values = list(w), nn.ParameterList(nn.Parameter(t.clone()) for t in w.values())

    def forward(self, f: Callable[..., torch.Tensor], *ins: torch.Tensor) -> torch.Tensor:
        return f(dict(zip(self.names, self.values, strict=True)), *ins)


class Llama(nn.Module):
    """The oracle's model, in the units that ZeRO 3 cuts."""

    def __init__(self, m: ModelSpec, w: dict[str, torch.Tensor]) -> None:
        super().__init__()
        said = [f"layers.{i}." for i in range(m.layers)]
        inside = [{n: t for n, t in w.items() if n.startswith(s)} for s in said]
        end = {n: w[n] for n in ("norm.weight", "head.weight")}
        self.m = m
        self.parts = nn.ModuleList(map(Part, ({"embedding.weight": w["embedding.weight"]}, *inside, end)))

    def forward(self, batch: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
        m, (first, *layers, last) = self.m, self.parts
        x = first(lambda w: F.embedding(batch["tokens"], w["embedding.weight"]))
        for i, layer in enumerate(layers):
            x = layer(lambda w, x, i=i: oracle._layer(m, w, i, i, x, batch, {})[0], x)

        def score(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            logits = oracle._logits(m, w, oracle._norm(m, w, "norm", x))
            return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-1, reduction="sum") * scale

        return last(score, x)


def _scatter() -> tuple[str, Callable[..., Any]]:
    """What this torch calls it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return name, getattr(dist, name)


def sharded_by_torch(rank: int, groups: ProcessGroups, case: Case, steps: int) -> Any:
    """Some steps of ours, and of FSDP2 with torch's AdamW -> losses of both, how far parameters are apart, how far they
    moved, and elements that both handed to a reduce-scatter."""
    from torch.distributed.fsdp import fully_shard  # a second, where every shard collects all tests

    lay, m, length = case.layout, case.model, case.sequence_length
    p = case.compile(rank)
    groups.make([*needed(p), Round((tuple(range(lay.world)),))])
    run = trainer(case, p, groups)
    start = {n: t.clone() for n, t in whole(run).items()}
    wires = Wires(rank)
    with wires.watch():
        ours = list(train(run, steps))
    mesh = DeviceMesh.from_group(groups[tuple(range(lay.world))], "cpu")
    model = Llama(m, start)
    for part in model.parts:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups_of = [[q for q in model.parameters() if (q.dim() > 1) == matrices] for matrices in (True, False)]
    s = OPTIMIZER
    optimizer = torch.optim.AdamW(
        [{"params": q, "weight_decay": d} for q, d in zip(groups_of, (s.weight_decay, 0.0), strict=True)],
        lr=s.learning_rate, betas=s.betas, eps=s.epsilon, foreach=False,
    )  # fmt: skip
    theirs, summed, (name, scatter) = list[float](), list[int](), _scatter()

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *a: Any, **k: Any) -> Any:
        summed.append(input.numel())
        return scatter(output, input, *a, **k)

    with torch.enable_grad(), patch.object(dist, name, reduce_scatter):
        for step in range(steps):
            batch = [sample(i, length, m.vocab_size) for i in range(step * lay.dp, (step + 1) * lay.dp)]
            count = sum(int((b.targets >= 0).sum()) for b in batch)
            loss = model(stacked([batch[rank]]), lay.world / count)  # it takes the mean over ranks
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach() / lay.world
            dist.all_reduce(total, group=groups[tuple(range(lay.world))])
            theirs.append(total.item())
    found = {
        n: t.full_tensor().detach() for part in model.parts for n, t in zip(part.names, part.values, strict=True)
    }  # fmt: skip
    apart = max((found[n] - t).abs().max().item() for n, t in whole(run).items())
    moved = max((start[n] - t).abs().max().item() for n, t in found.items())
    return ours, theirs, apart, moved, wires.bytes["reduce_scatter", tuple(range(lay.world))] // 8, sum(summed)


@pytest.mark.parametrize("layout", [Layout(dp=4, zero=3), Layout(dp=4, zero=2)], ids=str)
def test_fsdp_trains_alike(pool: Pool, layout: Layout) -> None:
    steps = 3
    for told in pool.run(sharded_by_torch, Case(DENSE, layout), steps):
        ours, theirs, apart, moved, sent, summed = told
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert apart < 1e-12 < 1e-2 < moved
        assert abs(sent - summed) < steps * 9 * layout.world * SHARD_MULTIPLE  # padding
