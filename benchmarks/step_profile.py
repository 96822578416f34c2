"""Two GPUs: the kernels of a step, named after the parts of its program, and the time that the host needs to launch each
part. `profile_overlap.py` compares them with the planned timeline.

    torchrun --nproc-per-node 2 benchmarks/step_profile.py --out FOLDER [--parts bare,profile,launch] [--cases a,b]

bare      milliseconds of steps without a profiler, and losses
profile   one step under torch's profiler: each kernel with its stream and the part of the step that launched it
launch    microseconds of the host for each part, in steps that are too small to keep the device busy
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from engine_truths import WARM, attempt, build, gather_all, record_head
from provenance import hexadecimal
from torch.profiler import ProfilerActivity, profile

from penteract.config.layout import Layout
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.profiled import ProfiledExecutor
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session import trainer as engine
from penteract.step.walk import Silent, walk

CASES: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1, "gradient_accumulation_steps": 2},
    "zero2": {"dp": 2, "zero": 2, "gradient_accumulation_steps": 2},
    "zero3": {"dp": 2, "zero": 3, "gradient_accumulation_steps": 2},
    "zero3_full": {"dp": 2, "zero": 3, "gradient_accumulation_steps": 2, "recompute": ("*",)},
    "tp": {"tp": 2, "gradient_accumulation_steps": 2},
    "cp": {"cp": 2, "cp_method": "ulysses", "gradient_accumulation_steps": 2},
    "pp": {"pp": 2, "gradient_accumulation_steps": 4},
    "pp_zb": {"pp": 2, "schedule": "zb_h1", "gradient_accumulation_steps": 4},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved", "gradient_accumulation_steps": 4},
}
EVENTS = [name for name in vars(Silent) if not name.startswith("_")]


def bare(trainer: engine.Trainer, samples: Any, count: int) -> dict[str, Any]:
    """The part `bare`."""
    size, losses, took = trainer.spec.layout.global_batch_size, list[float](), list[float]()
    for n in range(1, 1 + WARM + count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(trainer.step(n, samples, (n - 1) * size).loss)
        took.append(1e3 * (time.perf_counter() - begun))
    return {"step_ms": took[WARM:], "median_ms": median(took[WARM:]), "losses": losses}


def profiled(trainer: engine.Trainer, samples: Any, first: int) -> dict[str, Any]:
    """The part `profile`: the kernels of the second of two profiled steps."""
    size = trainer.spec.layout.global_batch_size
    with patch.object(engine, "walk", lambda p, run, **how: walk(p, ProfiledExecutor(run), **how)):
        trainer.step(first, samples, (first - 1) * size)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for n in (first + 1, first + 2):
                with torch.profiler.record_function(f"step {n}"):
                    trainer.step(n, samples, (n - 1) * size)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    return {"kernels": kernels(events, f"step {first + 2}")}


def kernels(events: list[dict[str, Any]], step: str) -> list[list[Any]]:
    """The kernels of one step in order: [stream, part, kernel, begin µs, duration µs]."""
    annotations = [e for e in events if e.get("cat") == "user_annotation"]
    whole = next(e for e in annotations if e["name"] == step)
    parts = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in annotations
                   if not e["name"].startswith("step ") and e["tid"] == whole["tid"])  # fmt: skip
    begins = [p[0] for p in parts]
    launched = {e["args"]["correlation"]: (e["ts"], e["tid"]) for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}  # fmt: skip
    rows = list[list[Any]]()
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at, _ = launched.get(e["args"].get("correlation"), (None, None))
        if at is None or not whole["ts"] <= at <= whole["ts"] + whole["dur"]:
            continue
        i = bisect_right(begins, at) - 1
        while i >= 0 and parts[i][1] < at:
            i -= 1
        part = parts[i][2] if i >= 0 and parts[i][0] >= whole["ts"] else ""
        rows.append(
            [e["args"].get("stream"), part, e["name"][:60], round(e["ts"] - whole["ts"], 2), round(e["dur"], 2)]
        )
    return sorted(rows, key=lambda r: r[3])


def launch_times(args: argparse.Namespace, rank: Rank, layout: Layout) -> dict[str, Any]:
    """The part `launch`: microseconds of the host for each event of the walk, and for each phase and op of a call."""
    small = argparse.Namespace(**{**vars(args), "model": "llama-3.2-1b", "seq": 256, "layers": 4})
    trainer, samples = build(small, rank, layout)
    size, took = layout.global_batch_size, defaultdict[str, list[float]](list)

    class Timed:
        """A run whose events are timed."""

        def __init__(self, run: Executor) -> None:
            self.run = run

        def __getattr__(self, event: str) -> Any:
            real = getattr(self.run, event)
            if event not in EVENTS:
                return real

            def timed(*arguments: Any) -> Any:
                begun = time.perf_counter()
                out = real(*arguments)
                key = f"call {arguments[1].phase} {arguments[1].site.op_name}" if event == "call" else event
                took[key].append(1e6 * (time.perf_counter() - begun))
                return out

            return timed

    for n in range(1, 4):
        trainer.step(n, samples, (n - 1) * size)
    with patch.object(engine, "walk", lambda p, run, **how: walk(p, Timed(run), **how)):
        for n in range(4, 9):
            trainer.step(n, samples, (n - 1) * size)
    return {
        name: {"median": median(some), "mean": sum(some) / len(some), "count": len(some)} for name, some in took.items()
    }


def case(name: str, args: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """The requested parts of a case."""
    layout, parts = Layout(**CASES[name]), dict[str, Any]()
    if {"bare", "profile"} & {*args.parts.split(",")}:
        trainer, samples = build(args, rank, layout)
        parts["bare"] = gather_all(bare(trainer, samples, args.steps), rank)
        if "profile" in args.parts:
            parts["profile"] = gather_all(profiled(trainer, samples, 1 + WARM + args.steps), rank)
        trainer.run.settle_parameters()
        del trainer, samples
    if "launch" in args.parts:
        gc.collect()
        torch.cuda.empty_cache()
        parts["launch"] = gather_all(launch_times(args, rank, layout), rank)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--parts", default="bare,profile,launch")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rank = join(os.environ, "cuda")
    about = "where a step's kernels run", "benchmarks/step_profile.py"
    record: dict[str, Any] = {**record_head(args, rank, *about), "layouts": CASES, "cases": {}}
    for name in args.cases.split(","):
        record["cases"][name] = attempt(name, partial(case, name, args, rank))
        if rank.number == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "step_profile.json").write_text(json.dumps(record) + "\n")
            ranks = record["cases"][name].get("bare")
            print(name, ranks and [round(r["median_ms"], 2) for r in ranks], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
