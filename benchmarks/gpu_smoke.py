"""One GPU: tiny models against the oracle of the tests in float64; then steps of a 1B model, eager and as a CUDA graph.

    python benchmarks/gpu_smoke.py OUT.json [--model llama-3.2-1b] [--steps 24]

The record has losses, step times, and predicted and measured memory of both, and a lower bound of the step time
(`floor_ms_at_670_tflops`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).parents[1] / d) for d in ("src", "tests")]

import torch

import oracle
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.resolve.presets import preset
from penteract.config.run import Data, LearningRateSchedule, Optimizer
from penteract.engine.comm.distributed import Nccl
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.cuda_graph import CapturedStep
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_count
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.state.state import allocate
from penteract.readings.price import price
from penteract.step.learning_rate import rate
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from penteract.units import gib
from samples import sample, stacked

SIZES: dict[str, Any] = dict(
    layers=2, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=64, vocab_size=64, initial_std=0.3
)
EXPERTS: dict[str, Any] = dict(experts=4, top_k=2, ffn_size=32)
TINY = {
    "dense": ModelSpec(**SIZES, qk_norm=True, tied=True, qkv_bias=True),
    "gpt2-like": ModelSpec(**SIZES, norm="layer", activation="gelu", positions="learned", mlp_bias=True,
                           output_bias=True, max_positions=64, sliding_window=5),
    "moe": ModelSpec(**SIZES, moe=MoESpec(**EXPERTS, shared_ffn_size=32)),
    "moe-sigmoid-bias": ModelSpec(**SIZES, moe=MoESpec(**EXPERTS, score="sigmoid", balance="bias")),
}  # fmt: skip


def parity(name: str, m: ModelSpec, device: torch.device, schedule: str) -> dict[str, Any]:
    """One step of a tiny model on `device` in float64: the largest relative error of a gradient against the oracle on a
    CPU."""
    p = compile_step(
        m, Layout(micro_batch_size=2, gradient_accumulation_steps=2), 16, precision="fp64", schedule=schedule
    )  # type: ignore[arg-type]
    state = allocate(p, device)
    initialise(p, state, 0)
    run = Executor(p, state, Nccl(0), REFERENCE, Fresh("fp64", device))
    drawn = [sample(i, 16, m.vocab_size) for i in range(4)]
    fixed = constants(p, device)
    run.micro_batches = [fixed | micro_batch(p, [drawn[i] for i in ids], device) for ids in samples_of(p, 0)]
    run.counts.fill_(target_count(drawn))
    walk(p, run)
    with torch.enable_grad():
        w = {n: t.cpu().clone().requires_grad_() for n, t in state.parameters.items()}
        scale = {"cross_entropy": 1 / target_count(drawn), "balance": m.moe.balance_coefficient / 4 if m.moe else 0.0}
        terms = oracle.loss(m, w, stacked(drawn), scale)
        torch.stack(list(terms.values())).sum().backward()
    worst = 0.0
    for n, t in w.items():
        assert t.grad is not None
        error, largest = (state.gradients[n].cpu() - t.grad).abs().max().item(), t.grad.abs().max().item()
        worst = max(worst, error / largest if largest > 1e-13 else error)
    return {
        "model": name,
        "schedule": schedule,
        "worst_gradient_error": worst,
        "loss_error": abs(run.totals[1].item() - terms["cross_entropy"].item()),
    }


class Steps:
    """Steps of a model on four batches of text, which are used in turn. The loss must fall."""

    def __init__(self, p: Program, device: torch.device) -> None:
        self.p, self.device = p, device
        self.state = allocate(p, device)
        initialise(p, self.state, 0)
        self.run = Executor(
            p,
            self.state,
            Nccl(0),
            REFERENCE,
            Fresh(p.precision, device),
            AdamW(Optimizer(learning_rate=3e-4), device),
        )
        train, _ = open_samples(Data(), open_tokenizer("bytes"), p.sequence_length, 0)
        fixed, self.batches, self.counts = constants(p, device), [], []
        for step in range(4):
            drawn = [[train.sample(i) for i in ids] for ids in samples_of(p, step * p.layout.global_batch_size)]
            self.batches.append([micro_batch(p, batch, device) for batch in drawn])
            self.counts.append(sum(target_count(batch) for batch in drawn))
        self.run.micro_batches = [fixed | {n: t.clone() for n, t in b.items()} for b in self.batches[0]]

    def feed(self, number: int) -> None:
        """Write all that changes between steps into the same tensors."""
        assert self.run.optimizer is not None
        for mine, new in zip(self.run.micro_batches, self.batches[number % 4], strict=True):
            for name, t in new.items():
                mine[name].copy_(t)
        self.run.counts.fill_(self.counts[number % 4])
        self.run.optimizer.step.fill_(number)
        self.run.optimizer.rate.fill_(rate(LearningRateSchedule(warmup_steps=10), 3e-4, number, 1000))

    def go(self, first: int, last: int, step: Any) -> tuple[list[float], list[float]]:
        """Losses and milliseconds of steps first..last."""
        losses, times = [], []
        for number in range(first, last + 1):
            self.feed(number)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
            losses.append(self.run.totals[1].item())
        return losses, times


def one_model(name: str, steps: int, sequence_length: int, device: torch.device) -> dict[str, Any]:
    """Eager steps, then captured ones from the same initial weights."""
    m = preset(name, where="--model").model
    layout = Layout(micro_batch_size=1, gradient_accumulation_steps=2)
    p = compile_step(m, layout, sequence_length, precision="bf16")
    priced = price(p)
    out: dict[str, Any] = {"case": "one step, reference kernels, eager and as one CUDA graph", "model": name,
                           "layout": asdict(layout), "sequence_length": sequence_length, "precision": "bf16, fp32 master and gradients",
                           "matmul_flops": priced.total_flops, "floor_ms_at_670_tflops": priced.total_flops / 670e9,
                           "predicted": {"allocated_gib": gib(priced.live), "peak_at": priced.peak_at}}  # fmt: skip
    for mode in ("eager", "captured"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        s = Steps(p, device)
        losses, _ = s.go(1, 4, lambda s=s: walk(p, s.run))
        eager_peak = torch.cuda.max_memory_allocated()
        if mode == "captured":
            graph = CapturedStep(s.run)
            graph.capture()
        more = s.go(5, steps, graph.replay if mode == "captured" else lambda s=s: walk(p, s.run))
        losses, timed = losses + more[0], more[1][2:]
        tokens = layout.global_batch_size * sequence_length
        out[mode] = {"losses": losses, "step_ms": timed, "median_ms": median(timed), "min_ms": min(timed), "max_ms": max(timed),
                     "tokens_per_s": tokens / median(timed) * 1e3, "peak_allocated_gib": gib(eager_peak),
                     "reserved_gib": gib(torch.cuda.memory_reserved())}  # fmt: skip
        del s
    out["max_abs_loss_difference"] = max(
        abs(a - b) for a, b in zip(out["eager"]["losses"], out["captured"]["losses"], strict=True)
    )
    out["loss_falls"] = out["eager"]["losses"][-1] < out["eager"]["losses"][0]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file of the record")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--commit", default="", help="for the record")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda")
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
              "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    record["parity"] = [parity(n, m, device, s) for n, m in TINY.items() for s in ("1f1b", "zb_h1", "overlapped")]
    for row in record["parity"]:
        print(row, flush=True)
    record |= one_model(args.model, args.steps, args.sequence_length, device)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print({k: v for k, v in record.items() if k not in ("parity",)})


if __name__ == "__main__":
    main()
