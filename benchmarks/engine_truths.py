"""What a step waits for on two GPUs: targets counted at its beginning or told before; and whether a trainer
that is deleted frees what it had.

    torchrun --nproc-per-node 2 benchmarks/engine_truths.py --out FOLDER [--parts counts,freed] [--steps 12]
        [--counts-at-begin]

counts    ZeRO 1 over both GPUs. `--counts-at-begin` forces the sum of targets at the beginning of every step, as a first
          step has it, so that it queues behind the gathers of the step before; without the switch both are run in one
          call, in both orders. Times are from CUDA events: of steps, from a step's begin to its first kernel, and of
          waits for parameters.
freed     Bytes allocated before a trainer is made, while it is there, after it is deleted with the collector off, and
          after a second one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from memory_options import drawn_on_device
from provenance import hexadecimal, provenance

from penteract.config.catalog import model as find_model
from penteract.config.layout import Layout
from penteract.config.run import Data, LearningRate, Optimizer, Precision, RunSpec
from penteract.engine.data import Samples, open_samples, open_tokenizer
from penteract.engine.executor.batch_loader import BatchLoader
from penteract.engine.executor.executor import Run
from penteract.engine.runtime.rank import Rank, join
from penteract.engine.session import trainer as engine
from penteract.units import gib

WARM = 3
WAITS = ("need", "exchange", "arrive", "settle")
LOAD = BatchLoader.load


@dataclass
class Marks:
    """Events on the stream that computes: pairs of before and after, by name."""

    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(default_factory=dict)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.pairs.setdefault(name, []).append((before, after))

    def milliseconds(self, name: str) -> list[float]:
        return [a.elapsed_time(b) for a, b in self.pairs.get(name, [])]


@contextmanager
def watched(marks: Marks) -> Iterator[None]:
    """Marks around all that comes before a step's first kernel, and around every wait for parameters or a message."""
    begin, scales = Run.begin, Run.scales
    opened = list[Any]()

    def begun(run: Run) -> None:
        opened.append(marks.around("begin"))
        opened[-1].__enter__()
        begin(run)

    def scaled(run: Run) -> None:
        scales(run)
        opened.pop().__exit__(None, None, None)

    def waiting(name: str) -> Callable[..., None]:
        real = getattr(Run, name)

        def wait(run: Run, *said: Any) -> None:
            with marks.around(name):
                real(run, *said)

        return wait

    with ExitStack() as stack:
        for name, function in {"begin": begun, "scales": scaled, **{name: waiting(name) for name in WAITS}}.items():
            stack.enter_context(patch.object(Run, name, function))
        yield


def counting(loader: BatchLoader, samples: Samples, first: int) -> list[int]:
    """Load a batch as usual, and return this rank's targets even where those of all ranks are known."""
    prefetched = loader.prefetched
    counts = LOAD(loader, samples, first)
    return counts if counts is not None or prefetched is None else prefetched.target_counts


def made(asked: argparse.Namespace, rank: Rank, layout: Layout) -> tuple[engine.Trainer, Samples]:
    model = replace(find_model(asked.model), layers=asked.layers) if asked.layers else find_model(asked.model)
    base = replace(layout, attention="cudnn", loss="chunked", elementwise="triton")
    run = RunSpec(
        model=model, layout=base, sequence_length=asked.seq, data=Data(pack_documents=False),
        optimizer=Optimizer(learning_rate=asked.rate), schedule=LearningRate(warmup_steps=2),
        precision=Precision(dtype="bf16"),
    )  # fmt: skip
    samples, _ = open_samples(run.data, open_tokenizer(run.tokenizer), run.sequence_length, 0)
    return engine.Trainer.build(run, rank), samples


def steps(
    trainer: engine.Trainer, samples: Samples, first: int, count: int, *, counts_at_begin: bool = False
) -> dict[str, Any]:
    """`count` steps from number `first` on, after some that warm up: milliseconds, waits, losses."""
    size, marks, losses = trainer.spec.layout.global_batch_size, Marks(), list[float]()
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for n in range(first, first + WARM + count):
        with ExitStack() as stack:
            if counts_at_begin:
                stack.enter_context(patch.object(BatchLoader, "load", counting))
            if n >= first + WARM:
                stack.enter_context(watched(marks))
                begins[n - first - WARM].record()
            losses.append(trainer.step(n, samples, (n - 1) * size).loss)
    begins[count].record()
    trainer.run.settle_parameters()
    torch.cuda.synchronize()
    took = [a.elapsed_time(b) for a, b in pairwise(begins)]
    waits = {name: sum(marks.milliseconds(name)) / count for name in WAITS}
    begin = marks.milliseconds("begin")
    return {
        "step_ms": took, "median_ms": median(took), "mean_ms": fmean(took), "begin_ms": begin,
        "mean_begin_ms": fmean(begin), "mean_waits_ms": waits, "losses": losses,
        "finite": all(map(isfinite, losses)),
    }  # fmt: skip


def on_all(mine: Any, rank: Rank) -> list[Any]:
    every: list[Any] = [None] * rank.world
    dist.all_gather_object(every, mine)
    return every


def counts(asked: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    layout = Layout(dp=rank.world, zero=1, gradient_accumulation_steps=asked.micros)
    trainer, samples = made(asked, rank, layout)
    rows, first = list[dict[str, Any]](), 1
    for forced in [True] if asked.counts_at_begin else [False, True, True, False]:
        row = steps(trainer, samples, first, asked.steps, counts_at_begin=forced)
        first += WARM + asked.steps
        rows.append({"counts_at_begin": forced, "ranks": on_all(row, rank)})
    return {"layout": "dp=2,zero=1", "micros": asked.micros, "rows": rows}


def freed(asked: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """With the collector off: reference counts alone free."""
    layout = Layout(dp=rank.world, zero=1, gradient_accumulation_steps=1)
    gc.collect()
    gc.disable()
    told = {"before": torch.cuda.memory_allocated()}
    for turn in ("first", "second"):
        trainer, samples = made(asked, rank, layout)
        for n in (1, 2):
            trainer.step(n, samples, (n - 1) * layout.global_batch_size)
        trainer.run.settle_parameters()
        torch.cuda.synchronize()
        told[f"with the {turn}"] = torch.cuda.memory_allocated()
        del trainer, samples
        told[f"after the {turn}"] = torch.cuda.memory_allocated()
    gc.enable()
    return {"layout": "dp=2,zero=1", "allocated_gib": on_all({name: gib(n) for name, n in told.items()}, rank)}


PARTS = {"counts": counts, "freed": freed}


def begun(asked: argparse.Namespace, rank: Rank, case: str, command: str) -> dict[str, Any]:
    """A record's head: what is measured, of what, on what."""
    return {
        "case": case, **provenance(command, asked.commit), "model": asked.model, "layers": asked.layers,
        "sequence_length": asked.seq, "device": f"{rank.world} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }  # fmt: skip


def attempt(name: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part tells, or how it failed; all ranks are there after it, and its memory is free."""
    try:
        told = part()
    except Exception:
        told = {"failed": traceback.format_exc()[-1500:]}
        print(name, told["failed"], file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="of the model; 0: all that it has")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--micros", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=10, help="timed, after three that warm up")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--counts-at-begin", action="store_true")
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    engine.initialise = drawn_on_device
    rank = join(os.environ, "cuda")
    about = "what a step waits for on two GPUs", "benchmarks/engine_truths.py"
    record: dict[str, Any] = {**begun(asked, rank, *about), "warm": WARM, "steps": asked.steps}
    for name in asked.parts.split(","):
        record[name] = attempt(name, partial(PARTS[name], asked, rank))
        if rank.number == 0:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "engine_truths.json").write_text(json.dumps(record, indent=1) + "\n")
            for row in record[name].get("rows", []):
                shown = {k: v for k, v in row.items() if k != "ranks"}
                told = [
                    {k: round(r[k], 3) for k in ("median_ms", "mean_begin_ms")} | r["mean_waits_ms"]
                    for r in row["ranks"]
                ]
                print(name, json.dumps(shown), json.dumps(told), flush=True)
            if "rows" not in record[name]:
                print(name, json.dumps(record[name]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
