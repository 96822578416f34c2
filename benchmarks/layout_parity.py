"""Layouts of four ranks against the oracle of the tests in float64: with NCCL on GPUs, with gloo elsewhere.

    torchrun --nproc-per-node 4 benchmarks/layout_parity.py OUT.json

The test suite compares all layouts with gloo. This record shows that the same programs work with NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / d) for d in ("src", "tests")]

import torch
import torch.distributed as dist

import oracle
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.engine.comm.distributed import Distributed
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_count
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.rank.rank import Rank, join
from penteract.engine.state.state import allocate
from penteract.step.arena import plan_arena
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from samples import sample, stacked

SIZES: dict[str, Any] = dict(
    layers=4, hidden_size=32, heads=8, kv_heads=2, head_size=4, ffn_size=64, vocab_size=64, initial_std=0.3
)
DENSE = ModelSpec(name="dense", **SIZES, qk_norm=True, tied=True)
MOE = ModelSpec(name="moe", **SIZES, moe=MoESpec(experts=8, top_k=2, ffn_size=32, shared_ffn_size=32, every=2))
CASES = [
    (DENSE, Layout(dp=4)),
    (DENSE, Layout(tp=4)),
    (DENSE, Layout(cp=4)),
    (DENSE, Layout(cp=4, cp_method="ring")),
    (DENSE, Layout(cp=4, cp_method="ulysses")),
    (DENSE, Layout(pp=4, gradient_accumulation_steps=8)),
    (DENSE, Layout(pp=4, gradient_accumulation_steps=8, schedule="zb_h1")),
    (DENSE, Layout(pp=2, vpp=2, tp=2, gradient_accumulation_steps=4, schedule="interleaved")),
    (DENSE, Layout(tp=2, pp=2, gradient_accumulation_steps=4, schedule="gpipe", recompute=("*",))),
    (DENSE, Layout(tp=2, cp=2, cp_method="ring", recompute=("tp_all_gather", "ring"))),
    (MOE, Layout(dp=4, ep=4)),
    (MOE, Layout(dp=2, tp=2, ep=2, expert_tp=2)),
    (MOE, Layout(tp=2, cp=2, ep=2, cp_method="ring")),
    (MOE, Layout(pp=2, dp=2, ep=2, gradient_accumulation_steps=4, schedule="zb_h1")),
]


def one_step(p: Program, rank: Rank, groups: ProcessGroups) -> Executor:
    """Run one step of a program."""
    groups.make(needed(p))
    state = allocate(p, rank.device)
    initialise(p, state, 0)
    run = Executor(p, state, Distributed(rank.number, groups), REFERENCE, Arena(plan_arena(p), "fp64", rank.device))
    fixed = constants(p, rank.device)
    mine = [[sample(i, 16, p.model.vocab_size) for i in ids] for ids in samples_of(p, 0)]
    run.micro_batches = [fixed | micro_batch(p, drawn, rank.device) for drawn in mine]
    run.counts.fill_(sum(target_count(drawn) for drawn in mine))
    walk(p, run, targets_counted=False)
    return run


def reference(m: ModelSpec, batch: int) -> tuple[dict[str, torch.Tensor], float]:
    """The oracle's gradients and cross entropy on a CPU."""
    state = allocate(p := compile_step(m, Layout(), 16, precision="fp64"), torch.device("cpu"))
    initialise(p, state, 0)
    drawn = [sample(i, 16, m.vocab_size) for i in range(batch)]
    scale = {"cross_entropy": 1 / target_count(drawn), "balance": m.moe.balance_coefficient / batch if m.moe else 0.0}
    with torch.enable_grad():
        w = {n: t.clone().requires_grad_() for n, t in state.parameters.items()}
        terms = oracle.loss(m, w, stacked(drawn), scale)
        torch.stack(list(terms.values())).sum().backward()
    return {n: t.grad for n, t in w.items() if t.grad is not None}, terms["cross_entropy"].item()


def worst(p: Program, run: Executor) -> tuple[float, float]:
    """The largest relative error of a gradient on this rank, and the error of the loss."""
    expected, ce = reference(p.model, p.layout.global_batch_size)
    error = 0.0
    for q in p.params:
        part = expected[q.name]
        for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
            part = part.narrow(dim, at, n)
        difference = (run.state.gradients[q.name].cpu() - part).abs().max().item()
        error = max(error, difference / expected[q.name].abs().max().item())
    return error, abs(run.totals[1].item() - ce)


def main(out: Path, commit: str) -> None:
    """Run all cases on all ranks; rank 0 writes the record."""
    torch.set_grad_enabled(False)
    rank, groups, rows = join(os.environ, "auto"), ProcessGroups(), list[dict[str, Any]]()
    for m, layout in CASES:
        p = compile_step(m, layout, 16, rank=rank.number, precision="fp64")
        begun = time.perf_counter()
        errors = torch.tensor(worst(p, one_step(p, rank, groups)), dtype=torch.float64, device=rank.device)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        used = {k: v for k, v in asdict(layout).items() if v != asdict(Layout())[k]}
        rows.append({"model": m.name, "layout": used, "gradient_error": errors[0].item(), "loss_error": errors[1].item(),
                     "seconds": time.perf_counter() - begun})  # fmt: skip
        if rank.number == 0:
            print(rows[-1], flush=True)
    if rank.number == 0:
        device = torch.cuda.get_device_name() if rank.device.type == "cuda" else "cpu"
        out.write_text(json.dumps({
            "case": "layouts of four ranks against the oracle, float64, registers in the arena", "commit": commit,
            "device": f"{rank.world} x {device}", "backend": dist.get_backend(), "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"), "worst_gradient_error": max(r["gradient_error"] for r in rows),
            "bound": 1e-10, "layouts": rows,
        }, indent=1) + "\n")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
