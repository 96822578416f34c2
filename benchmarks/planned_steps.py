"""One node: layouts that are planned and then trained: predicted and measured memory and time.

    torchrun --nproc-per-node 4 benchmarks/planned_steps.py --model llama-3.2-1b --gpus 4xH200 --out FOLDER

Each layout is planned (`penteract.plan`). A `Trainer` is built from the settings of the planned run file, and takes twelve
steps on the built-in text. The first four are not timed. The time of a step is that between two CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.distributed as dist

from penteract import plan
from penteract.config.run import LearningRateSchedule
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.trainer import Trainer
from penteract.planner.report.runfile import as_run
from penteract.units import gib

LAYOUTS = (
    "dp=4,zero=1", "dp=4,zero=0", "tp=2,dp=2,zero=1", "tp=4", "pp=2,dp=2,zero=1", "pp=2,dp=2,zero=1,schedule=zb_h1",
    "pp=2,tp=2,schedule=interleaved,vpp=2", "pp=4,schedule=interleaved,vpp=2", "cp=2,dp=2,zero=1,cp_method=ulysses",
    "cp=4,cp_method=all_gather", "dp=4,zero=1,recompute=full", "dp=4,zero=1,mbs=2",
)  # fmt: skip
STEPS, WARM = 12, 4


def row(rank: Rank, args: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Plan and train a layout. -> its row"""
    planned = plan(args.model, args.gpus, sequence_length=args.seq, batch=args.batch, layout=layout)
    best = planned.best
    run = as_run(planned.ask, best.layout).run
    run = replace(
        run, lr_schedule=LearningRateSchedule(warmup_steps=2), optimizer=replace(run.optimizer, learning_rate=3e-4)
    )
    samples, _ = open_samples(run.data, open_tokenizer(run.tokenizer), run.sequence_length, 0)
    trainer = Trainer.build(run, rank)
    torch.cuda.reset_peak_memory_stats()
    marks, losses = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)], []
    for n in range(1, STEPS + 1):
        marks[n - 1].record()
        losses.append(trainer.step(n, samples, (n - 1) * run.layout.global_batch_size).loss)
    marks[STEPS].record()
    torch.cuda.synchronize()
    took = [a.elapsed_time(b) for a, b in zip(marks[WARM:-1], marks[WARM + 1 :], strict=True)]
    mine = {"allocated_gib": gib(torch.cuda.max_memory_allocated()), "reserved_gib": gib(torch.cuda.max_memory_reserved()),
            "device_gib": gib(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0])}  # fmt: skip
    every: list[Any] = [None] * rank.world
    dist.all_gather_object(every, mine)
    by_pp_rank = [gib(b) for b in best.estimate.by_pp_rank]
    each = rank.world // run.layout.pp
    return {
        "layout": layout, "attention": best.layout.attention, "losses": losses, "step_ms": took,
        "predicted": {"allocated_gib": [by_pp_rank[r // each] for r in range(rank.world)],
                      "step_ms": 1e3 * best.time.seconds, "parts_ms": {k: 1e3 * v for k, v in best.time.parts.items() if v}},
        "measured": {key: [one[key] for one in every] for key in mine} | {"step_ms": median(took)},
        "time_over_predicted": median(took) / (1e3 * best.time.seconds),
        "allocated_over_predicted": max(e["allocated_gib"] / by_pp_rank[r // each] for r, e in enumerate(every)),
        "falls": losses[-1] < losses[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--gpus", default="4xH200")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", default="16seqs", help="of a step")
    parser.add_argument("--commit", default="", help="for the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rank = join(os.environ, "cuda")
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    record: dict[str, Any] = {
        "case": "layouts planned and trained", "model": args.model, "gpus": args.gpus, "sequence_length": args.seq,
        "batch": args.batch, "commit": args.commit or git, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }  # fmt: skip
    for layout in LAYOUTS:
        try:
            record["rows"].append(row(rank, args, layout))
        except Exception:
            record["rows"].append({"layout": layout, "failed": traceback.format_exc()[-1500:]})
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        if rank.number == 0:
            last = record["rows"][-1]
            print(json.dumps({k: last[k] for k in ("layout", "time_over_predicted", "allocated_over_predicted", "falls", "failed") if k in last}), flush=True)  # fmt: skip
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "planned_steps.json").write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
