"""One node: options that reduce memory, each against the same base: predicted and measured memory and time.

    torchrun --nproc-per-node 2 benchmarks/memory_options.py --model llama-3.1-8b --gpus 2xH200 --out FOLDER
    torchrun --nproc-per-node 4 benchmarks/memory_options.py --model llama-3.1-70b --gpus 4xH200 --cases large --out FOLDER

The data is the built-in text. The time of a step is that between two CUDA events.
The first `WARM` steps are not timed. Allocated memory is the peak of torch's allocator over all steps, on each rank. `falls`
is false if the loss is not finite or does not fall; the times of such a case are not valid.
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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from provenance import hexadecimal

from penteract.config.catalog import model as find_model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.run import Data, LearningRateSchedule, Optimizer, Precision, RunSpec
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session import trainer as engine
from penteract.readings.estimator import Estimator
from penteract.units import gib

WARM = 3


@dataclass(frozen=True)
class Case:
    """The fields of layout, precision and optimizer in which a case differs from the base."""

    name: str
    layout: Mapping[str, Any] = field(default_factory=dict[str, Any])
    precision: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])


FULL = {"recompute": ("*",)}
FP8 = [Case(name, precision={"dtype": name}) for name in ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise")]  # fmt: skip
CASES: Mapping[str, list[Case]] = {
    "options": [
        Case("base: ZeRO 1, bf16, nothing recomputed, chunked loss"),
        Case("loss of all logits at once", {"loss": "reference"}),
        Case("ZeRO 2", {"zero": 2}),
        Case("ZeRO 3", {"zero": 3}),
        Case("ZeRO 3, parameters kept gathered", {"zero": 3, "reshard_after_step": True}),
        Case("ZeRO 3, gradients summed once", {"zero": 3, "reduce_scatter_once": True}),
        Case("HSDP: ZeRO 3 in groups of 2", {"zero": 3, "shard_group": 2}),
        Case("full recomputation", FULL),
        Case("every second layer recomputed", {**FULL, "recompute_every": 2}),
        Case("activations and norms recomputed", {"recompute": ("tp_all_gather", "swiglu", "rms_norm")}),
        Case("full recomputation, inputs of layers on the host", {**FULL, "offload": ("layer_inputs",)}),
        Case("bf16 alone, rounded by chance", precision={"dtype": "bf16_pure"}),
        Case("moments in 8 bits", precision={"moments": "int8"}),
        Case("gradients summed in bf16", precision={"reduce": "bf16"}),
        Case("fp16", precision={"dtype": "fp16"}),
        *FP8,
        Case("optimizer on the host", {"offload_optimizer": True}),
        Case("Muon", optimizer={"kind": "muon"}),
        Case("ZeRO 3, FP8 tensorwise", {"zero": 3}, {"dtype": "fp8_tensorwise"}),
        Case("ZeRO 3, FP8 tensorwise, weights gathered in FP8", {"zero": 3}, {"dtype": "fp8_tensorwise", "fp8_gather": True}),
        Case("quantisation and updates in plain torch: bf16", {"elementwise": "reference"}),
        Case("quantisation and updates in plain torch: FP8 tensorwise", {"elementwise": "reference"}, {"dtype": "fp8_tensorwise"}),
    ],
    "large": [
        Case("ZeRO 3, bf16 parameters, gradients and 8-bit moments (6 bytes a parameter), full recomputation",
             {"zero": 3, **FULL}, {"dtype": "bf16_pure", "moments": "int8"}),
        Case("the same with tp = 2", {"zero": 3, **FULL, "tp": 2}, {"dtype": "bf16_pure", "moments": "int8"}),
    ],
}  # fmt: skip


def as_run(args: argparse.Namespace, case: Case, world: int) -> RunSpec:
    """The run of a case."""
    changes = dict(case.layout)
    dp = world // changes.get("tp", 1)
    base = Layout(
        dp=dp, zero=1, attention="cudnn", loss="chunked", elementwise="triton",
        gradient_accumulation_steps=args.sequences // dp,
    )  # fmt: skip
    return RunSpec(
        model=find_model(args.model), layout=replace(base, **changes), sequence_length=args.seq,
        optimizer=Optimizer(learning_rate=args.rate, **case.optimizer), lr_schedule=LearningRateSchedule(warmup_steps=2),
        data=Data(pack_documents=False), precision=Precision(**{"dtype": "bf16", **case.precision}),
    )  # fmt: skip


def measure(rank: Rank, args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Plan and run a case. -> its row"""
    run = as_run(args, case, rank.world)
    lay = run.layout
    estimator = Estimator(
        run.model, cluster(args.gpus), args.seq, precision=run.precision.policy, optimizer_kinds=run.optimizer.optimizer_kinds
    )  # fmt: skip
    estimate = estimator.estimate(lay)
    planned, by_pp_rank = estimator.time(estimate).seconds, [gib(b) for b in estimate.by_pp_rank]
    samples, _ = open_samples(run.data, open_tokenizer(run.tokenizer), run.sequence_length, 0)
    trainer = engine.Trainer.build(run, rank)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    marks, losses = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)], []
    for n in range(1, args.steps + 1):
        marks[n - 1].record()
        losses.append(trainer.step(n, samples, (n - 1) * lay.global_batch_size).loss)
    marks[args.steps].record()
    trainer.run.settle_parameters()  # collectives in flight would keep their buffers
    torch.cuda.synchronize()
    took = [a.elapsed_time(b) for a, b in zip(marks[WARM:-1], marks[WARM + 1 :], strict=True)]
    free, total = torch.cuda.mem_get_info()
    mine = {
        "allocated_gib": gib(torch.cuda.max_memory_allocated()), "reserved_gib": gib(torch.cuda.max_memory_reserved()),
        "device_gib": gib(total - free),
    }  # fmt: skip
    every: list[Any] = [None] * rank.world
    dist.all_gather_object(every, mine)
    predicted = [by_pp_rank[r // (rank.world // lay.pp)] for r in range(rank.world)]
    return {
        "case": case.name, "layout": {**case.layout, **case.precision, **case.optimizer},
        "predicted": {"allocated_gib": predicted, "step_ms": 1e3 * planned},
        "measured": {key: [one[key] for one in every] for key in mine},
        "step_ms": took, "median_ms": median(took), "losses": losses,
        "allocated_over_predicted": max(e["allocated_gib"] / p for e, p in zip(every, predicted, strict=True)),
        "time_over_predicted": median(took) / (1e3 * planned),
        "falls": all(map(isfinite, losses)) and losses[-1] < losses[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpus", default="2xH200")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--cases", default="options", choices=list(CASES))
    parser.add_argument("--only", default="", help="indices of cases, from 0: 0,3,7")
    parser.add_argument("--seconds", type=float, default=1e9, help="no case begins after so many seconds")
    parser.add_argument("--commit", default="", type=hexadecimal, help="for the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begun = time.monotonic()
    torch.set_grad_enabled(False)
    rank = join(os.environ, "cuda")
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    record: dict[str, Any] = {
        "case": f"memory: {args.cases}", "model": args.model, "gpus": args.gpus, "sequence_length": args.seq,
        "sequences_a_step": args.sequences, "commit": args.commit or git, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": time.strftime("%Y-%m-%d"), "rows": [],
    }  # fmt: skip
    chosen = [int(n) for n in args.only.split(",")] if args.only else range(len(CASES[args.cases]))
    for case in (CASES[args.cases][n] for n in chosen):
        late = [time.monotonic() - begun > args.seconds]
        dist.broadcast_object_list(late, src=0)
        if late[0]:
            break
        try:
            record["rows"].append(measure(rank, args, case))
        except Exception:
            record["rows"].append({"case": case.name, "failed": traceback.format_exc()[-1500:]})
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        if rank.number == 0:
            last = record["rows"][-1]
            shown = ("case", "median_ms", "time_over_predicted", "allocated_over_predicted", "falls", "failed")
            print(round(time.monotonic() - begun), json.dumps({k: last[k] for k in shown if k in last}), flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"memory_{args.cases}.json").write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
