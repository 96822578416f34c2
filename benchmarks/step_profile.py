"""Where a step's kernels run on two GPUs, in the names of its program, beside the timeline that is planned; and what the
host needs to launch each part.

    torchrun --nproc-per-node 2 benchmarks/step_profile.py --out FOLDER [--parts bare,profile,launch] [--cases a,b]

bare      milliseconds of steps, nothing observed; losses
profile   one step under torch's profiler: every kernel with its stream and the part of the step that launched it
launch    microseconds of the host for each part, of steps too small to keep the device busy
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
from engine_truths import WARM, attempt, begun, made, on_all
from memory_options import drawn_on_device
from provenance import hexadecimal
from torch.profiler import ProfilerActivity, profile

from penteract.config.layout import Layout
from penteract.engine.executor.executor import Run
from penteract.engine.executor.profiled import ProfiledRun
from penteract.engine.runtime.rank import Rank, join
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
QUESTIONS = [name for name in vars(Silent) if not name.startswith("_")]


def bare(trainer: engine.Trainer, samples: Any, count: int) -> dict[str, Any]:
    size, losses, took = trainer.spec.layout.global_batch_size, list[float](), list[float]()
    for n in range(1, 1 + WARM + count):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(trainer.step(n, samples, (n - 1) * size).loss)
        took.append(1e3 * (time.perf_counter() - begun))
    return {"step_ms": took[WARM:], "median_ms": median(took[WARM:]), "losses": losses}


def profiled(trainer: engine.Trainer, samples: Any, first: int) -> dict[str, Any]:
    """The second of two profiled steps, rank by rank."""
    size = trainer.spec.layout.global_batch_size
    with patch.object(engine, "walk", lambda p, run, **how: walk(p, ProfiledRun(run), **how)):
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
    """[stream, part, kernel, begin µs, duration µs], in the order of the stream's work, of one step."""
    noted = [e for e in events if e.get("cat") == "user_annotation"]
    whole = next(e for e in noted if e["name"] == step)
    parts = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in noted
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


def launched(asked: argparse.Namespace, rank: Rank, layout: Layout) -> dict[str, Any]:
    """Microseconds of the host by question, and by word of a call: medians of several steps."""
    small = argparse.Namespace(**{**vars(asked), "model": "llama-3.2-1b", "seq": 256, "layers": 4})
    trainer, samples = made(small, rank, layout)
    size, took = layout.global_batch_size, defaultdict[str, list[float]](list)

    class Timed:
        def __init__(self, run: Run) -> None:
            self.run = run

        def __getattr__(self, question: str) -> Any:
            real = getattr(self.run, question)
            if question not in QUESTIONS:
                return real

            def asked(*about: Any) -> Any:
                begun = time.perf_counter()
                out = real(*about)
                key = f"call {about[1].phase} {about[1].site.op_name}" if question == "call" else question
                took[key].append(1e6 * (time.perf_counter() - begun))
                return out

            return asked

    for n in range(1, 4):
        trainer.step(n, samples, (n - 1) * size)
    with patch.object(engine, "walk", lambda p, run, **how: walk(p, Timed(run), **how)):
        for n in range(4, 9):
            trainer.step(n, samples, (n - 1) * size)
    return {
        name: {"median": median(some), "mean": sum(some) / len(some), "count": len(some)} for name, some in took.items()
    }


def case(name: str, asked: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    layout, told = Layout(**CASES[name]), dict[str, Any]()
    if {"bare", "profile"} & {*asked.parts.split(",")}:
        trainer, samples = made(asked, rank, layout)
        told["bare"] = on_all(bare(trainer, samples, asked.steps), rank)
        if "profile" in asked.parts:
            told["profile"] = on_all(profiled(trainer, samples, 1 + WARM + asked.steps), rank)
        trainer.run.settle_parameters()
        del trainer, samples
    if "launch" in asked.parts:
        gc.collect()
        torch.cuda.empty_cache()
        told["launch"] = on_all(launched(asked, rank, layout), rank)
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--parts", default="bare,profile,launch")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    engine.initialise = drawn_on_device
    rank = join(os.environ, "cuda")
    about = "where a step's kernels run", "benchmarks/step_profile.py"
    record: dict[str, Any] = {**begun(asked, rank, *about), "layouts": CASES, "cases": {}}
    for name in asked.cases.split(","):
        record["cases"][name] = attempt(name, partial(case, name, asked, rank))
        if rank.number == 0:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "step_profile.json").write_text(json.dumps(record) + "\n")
            told = record["cases"][name].get("bare")
            print(name, told and [round(r["median_ms"], 2) for r in told], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
