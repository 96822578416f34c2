"""What the host needs to ask for a step, beside what kernels need: a whole step of 16 layers whose kernels do nothing.

    python benchmarks/host_time.py [--out FOLDER] [--layers 16] [--profile]

Widths are small and the device is a CPU: neither changes what Python does. Printed, and written to FOLDER/host_time.json:
µs of a step and of a call, medians over several steps, of

walk     the walk alone, with a reading that ignores everything
first    a run's first step, which finds where registers lie
run      later steps: registers, kernels' arguments, and the step's own numbers
outside  the part of `run` that is not a call's: factors, totals, zeroing

With --profile: where the time of later steps is, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch

from penteract.config.layout import FUSIONS, Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.distributed import Gloo
from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.batch_loader import allocate_micro_batches
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.state.state import allocate
from penteract.ops.declarations import OPS
from penteract.step.arena import plan_arena
from penteract.step.program import Program, compile_step
from penteract.step.walk import Silent, walk

STEPS = 30
MODEL = ModelSpec(
    layers=16, hidden_size=64, heads=4, kv_heads=2, head_size=16, ffn_size=128, vocab_size=256, initial_std=0.02
)
LAYOUTS = {
    "reference": Layout(),
    "fused": Layout(elementwise="triton", fuse=tuple(f for f in FUSIONS if f != "fp8"), loss="chunked"),
    "four micro-batches": Layout(gradient_accumulation_steps=4),
    "recomputed": Layout(recompute=("*",)),
}


def nothing(*_: Any) -> None:
    """A kernel."""


IDLE = TorchKernel(nothing, nothing, nothing)


def microseconds(step: Callable[[], Any], steps: int = STEPS) -> list[float]:
    """Of each step."""
    took: list[float] = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        took.append((time.perf_counter() - begun) * 1e6)
    return took


def idle(p: Program) -> Executor:
    """A run whose kernels do nothing, in an arena, without an optimizer; sums are torch's."""
    device = torch.device("cpu")
    run = Executor(p, allocate(p, device), Gloo(0), dict.fromkeys(OPS, IDLE), Arena(plan_arena(p), p.precision, device))
    run.squares, run.micro_batches = None, allocate_micro_batches(p, device)
    return run


def measured(layout: Layout, layers: int) -> tuple[dict[str, Any], Executor]:
    """A row, and the run that it is of."""
    p = compile_step(replace(MODEL, layers=layers), layout, 64, precision="bf16")
    calls = sum(1 for a in p.actions for _ in p.instructions(a))  # type: ignore[arg-type]
    run = idle(p)
    first = microseconds(lambda: walk(p, run), 1)[0]
    whole = median(microseconds(lambda: walk(p, run)))
    alone = median(microseconds(lambda: walk(p, Silent())))
    empty = replace(p, actions=())
    run.p = empty
    outside = median(microseconds(lambda: walk(empty, run)))
    run.p = p
    row = {"calls": calls, "walk": alone, "first": first, "run": whole, "outside": outside}
    return row | {"µs a call": (whole - outside) / calls, "µs a call, walk alone": alone / calls}, run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {"layers": given.layers, "torch": torch.__version__, "python": sys.version.split()[0]}
    for name, layout in LAYOUTS.items():
        found[name], run = measured(layout, given.layers)
        print(name, {k: round(v, 2) for k, v in found[name].items()}, flush=True)
        if given.profile:
            profile = cProfile.Profile()
            profile.enable()
            microseconds(lambda run=run: walk(run.p, run))
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "host_time.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
