"""One GPU: the chunked loss against the loss of all logits at once: values, memory, and the time of forward and backward.

    python benchmarks/chunked_loss.py --out FOLDER [--chunks 0,512,1024,4096] [--tokens 8192 --words 128256 --width 4096]

Writes FOLDER/chunked_loss.json. The model has one small layer, so that the head is nearly all of it. A step runs without an
update. Each gradient is compared with that of `kernels.loss = "reference"`: the norm of the difference over the norm must
be within `TOLERANCE`. (Both round products to bf16; sums over chunks round in fp32.) The record has the allocated and the
predicted memory. Times are medians of ten steps.
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
from provenance import hexadecimal, provenance

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.distributed import Nccl
from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, target_counts
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.kernels.registry import kernels
from penteract.engine.state.state import allocate
from penteract.readings.price import price
from penteract.step.arena import plan_arena
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from penteract.units import gib
from samples import sample

TOLERANCE = 1e-2
STEPS, WARM_UP = 10, 3


def prepare(p: Program, device: torch.device) -> Executor:
    """A run with one sequence, and weights from the seed."""
    state = allocate(p, device)
    initialise(p, state, 0)
    run = Executor(p, state, Nccl(0), kernels(p, device), Arena(plan_arena(p), p.precision, device))
    drawn = [sample(0, p.sequence_length, p.model.vocab_size)]
    run.micro_batches = [constants(p, device) | micro_batch(p, drawn, device)]
    run.counts.copy_(torch.tensor(target_counts(p, [drawn])))
    return run


def timed(run: Executor, device: torch.device) -> float:
    """Seconds of forward and backward. The sum of target counts over one rank changes nothing, so it may be repeated."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    walk(run.p, run)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(model: ModelSpec, layout: Layout, tokens: int, device: torch.device) -> tuple[dict[str, Any], Executor]:
    """The record row of a layout, and its run."""
    p = compile_step(model, layout, tokens, precision="bf16")
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    run = prepare(p, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [timed(run, device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    priced = price(p)
    row = {
        "loss": layout.loss, "chunk": layout.loss_chunk, "seconds": median(times), "spread": max(times) - min(times),
        "losses": run.totals[1:-1].tolist(), "measured_gib": gib(peak), "priced_gib": gib(priced.allocated),
        "arena_gib": gib(priced.arena), "workspace_gib": gib(priced.workspace),
    }  # fmt: skip
    return row, run


def relative_errors(run: Executor, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """For each gradient, the norm of its difference over its norm. NaN stays NaN."""
    pairs = ((n, run.state.gradients[n], g) for n, g in expected.items())
    return {n: ((x - g).norm() / g.norm().clamp(min=1e-9)).item() for n, x, g in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chunks", default="0,512,1024,4096", help="tokens of a chunk; 0: the default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", type=hexadecimal)
    for name, n in (("tokens", 8192), ("words", 128256), ("width", 4096)):
        parser.add_argument(f"--{name}", type=int, default=n)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    model = ModelSpec(
        layers=1, hidden_size=args.width, heads=8, kv_heads=8, head_size=128, ffn_size=1024, vocab_size=args.words,
        z_loss_coefficient=1e-4,
    )  # fmt: skip
    plain = Layout(attention="cudnn" if device.type == "cuda" else "reference")  # without document masks, in all runs
    row, run = measure(model, plain, args.tokens, device)
    expected, rows = dict(run.state.gradients), [row]
    del run
    for chunk in map(int, args.chunks.split(",")):
        layout = Layout(attention=plain.attention, loss="chunked", loss_chunk=chunk)
        row, run = measure(model, layout, args.tokens, device)
        row["off"] = relative_errors(run, expected)
        row["ok"] = all(x <= TOLERANCE for x in row["off"].values())
        rows.append(row)
        del run
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        **provenance("python benchmarks/chunked_loss.py --out FOLDER", args.commit), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "tokens": args.tokens,
        "words": args.words, "width": args.width, "tolerance": TOLERANCE, "rows": rows,
    }  # fmt: skip
    (args.out / "chunked_loss.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print({name: value for name, value in row.items() if name != "off"})


if __name__ == "__main__":
    main()
