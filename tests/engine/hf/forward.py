"""Logits of a folder's weights, by ranks of any layout: every rank fills its own rectangles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.distributed import Gloo
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch
from penteract.engine.hf.weights import open_weights, start_from
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.state.state import allocate
from penteract.ops.tape import Site
from penteract.step.program import compile_step
from penteract.step.walk import walk_forward

CPU = torch.device("cpu")
Columns = dict[int, torch.Tensor]  # first column of a table's shard -> logits [S, V@tp]


@torch.no_grad()
def logits(
    rank: int, groups: ProcessGroups, path: Path, model: ModelSpec, layout: Layout, tokens: list[int], precision: str
) -> Columns:
    """This rank's columns of the logits of `tokens`; none from ranks without a head, or with other tokens."""
    p = compile_step(model, layout, len(tokens), rank=rank, precision=precision, training=False)
    groups.make(needed(p))
    state = allocate(p, CPU)
    start_from(open_weights(path, p), p, state)
    seen: list[torch.Tensor] = []

    def row_max(env: Env, site: Site, ins: list[Any], weights: list[Any], outs: list[Any]) -> None:
        """The first that the loss does with logits."""
        seen.append(ins[0])
        REFERENCE["row_max"].forward(env, site, ins, weights, outs)

    kernels = REFERENCE | {"row_max": TorchKernel(row_max)}
    run = Executor(p, state, Gloo(rank, groups), kernels, Fresh(precision, CPU))
    nothing = torch.zeros(len(tokens), dtype=torch.int64)
    sample = SimpleNamespace(
        tokens=torch.tensor(tokens), targets=nothing - 1, start=nothing, positions=torch.arange(len(tokens))
    )
    run.micro_batches = [constants(p, CPU) | micro_batch(p, [sample], CPU)]
    walk_forward(p, run)
    return {p.mesh.coordinates(rank)["tp"]: seen[0][:, 0].clone()} if seen else {}


def joined(found: list[Columns]) -> torch.Tensor:
    """[S, V] from the ranks' columns; copies (over dp) are the same."""
    columns = {tp: x for rank in found for tp, x in rank.items()}
    return torch.cat([columns[tp] for tp in sorted(columns)], 1)
