"""One GPU: the chunked loss against the loss of all logits at once. Values, memory, and time of a step's passes.

    python benchmarks/chunked_loss.py --out FOLDER [--chunks 0,512,1024,4096] [--tokens 8192 --words 128256 --width 4096]

Writes FOLDER/chunked_loss.json. A model of one small layer, so that the head is nearly all of it, walks a step without
an update: losses and every gradient are held to those of `kernels.loss = "reference"` within `TOLERANCE`, by the norm
of the difference over the norm (both round bf16 products; sums over chunks round in fp32). What was allocated is held
to the price, and the time of the two passes is the median of ten.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / d) for d in ("src", "tests", "benchmarks")]

import torch
from memory_options import drawn_on_device
from provenance import hexadecimal, provenance

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.distributed import Nccl
from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.executor import Run
from penteract.engine.executor.feed import constants, micro_batch, target_counts
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.executor.state import allocate
from penteract.engine.kernels.registry import kernels
from penteract.readings.price import price
from penteract.step.arena import plan_arena
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from penteract.units import gib
from samples import sample

TOLERANCE = 1e-2
STEPS, WARM_UP = 10, 3


def prepare(p: Program, device: torch.device) -> Run:
    """A run of one sequence, weights by the seed."""
    state = allocate(p, device)
    (drawn_on_device if device.type == "cuda" else initialise)(p, state, 0)
    run = Run(p, state, Nccl(0), kernels(p, device), Arena(plan_arena(p), p.precision, device))
    drawn = [sample(0, p.sequence_length, p.model.vocab_size)]
    run.micro_batches = [constants(p, device) | micro_batch(p, drawn, device)]
    run.counts.copy_(torch.tensor(target_counts(p, [drawn])))
    return run


def timed(run: Run, device: torch.device) -> float:
    """Seconds of both passes. Counts of targets are summed in place over one rank: they stay."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    walk(run.p, run)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(model: ModelSpec, layout: Layout, tokens: int, device: torch.device) -> tuple[dict[str, Any], Run]:
    p = compile_step(model, layout, tokens, precision="bf16")
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    run = prepare(p, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [timed(run, device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    priced = price(p)
    told = {
        "loss": layout.loss, "chunk": layout.loss_chunk, "seconds": median(times), "spread": max(times) - min(times),
        "losses": run.totals[1:-1].tolist(), "measured_gib": gib(peak), "priced_gib": gib(priced.allocated),
        "arena_gib": gib(priced.arena), "workspace_gib": gib(priced.workspace),
    }  # fmt: skip
    return told, run


def off(run: Run, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of each gradient's difference over its norm. NaN stays NaN."""
    pairs = ((n, run.state.gradients[n], g) for n, g in wanted.items())
    return {n: ((x - g).norm() / g.norm().clamp(min=1e-9)).item() for n, x, g in pairs}


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--chunks", default="0,512,1024,4096")
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--commit", default="", type=hexadecimal)
    for name, n in (("tokens", 8192), ("words", 128256), ("width", 4096)):
        ask.add_argument(f"--{name}", type=int, default=n)
    given = ask.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device(given.device)
    model = ModelSpec(
        layers=1, hidden_size=given.width, heads=8, kv_heads=8, head_size=128, ffn_size=1024, vocab_size=given.words,
        z_loss_coefficient=1e-4,
    )  # fmt: skip
    plain = Layout(attention="cudnn" if device.type == "cuda" else "reference")  # documents see each other: in all runs
    told, run = measure(model, plain, given.tokens, device)
    wanted, rows = dict(run.state.gradients), [told]
    del run
    for chunk in map(int, given.chunks.split(",")):
        layout = Layout(attention=plain.attention, loss="chunked", loss_chunk=chunk)
        told, run = measure(model, layout, given.tokens, device)
        told["off"] = off(run, wanted)
        told["ok"] = all(x <= TOLERANCE for x in told["off"].values())
        rows.append(told)
        del run
    given.out.mkdir(parents=True, exist_ok=True)
    record = {
        **provenance("python benchmarks/chunked_loss.py --out FOLDER", given.commit), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "tokens": given.tokens,
        "words": given.words, "width": given.width, "tolerance": TOLERANCE, "rows": rows,
    }  # fmt: skip
    (given.out / "chunked_loss.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print({name: value for name, value in row.items() if name != "off"})


if __name__ == "__main__":
    main()
