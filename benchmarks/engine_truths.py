"""Two GPUs: the start of a step with and without a collective for the number of targets, and memory freed by a trainer.

    torchrun --nproc-per-node 2 benchmarks/engine_truths.py --out FOLDER [--parts counts,freed] [--steps 12]
        [--counts-at-begin]

counts    ZeRO 1 over both GPUs. Usually a step sends the number of targets to the next one. `--counts-at-begin` makes each
          step sum it at its beginning, as the first step does; this sum queues behind the all-gathers of the step before.
          Without the option, the call runs both ways, in both orders. It measures, by CUDA events, whole steps, the time
          from the beginning of a step to its first kernel, and waits for parameters.
freed     The bytes allocated before a trainer is built, while it exists, after it is deleted with Python's garbage
          collector off, and the same for a second trainer.
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
from provenance import hexadecimal, provenance

from penteract.config.catalog import model as find_model
from penteract.config.layout import Layout
from penteract.config.run import Data, LearningRateSchedule, Optimizer, Precision, RunSpec
from penteract.engine.data import Samples, open_samples, open_tokenizer
from penteract.engine.executor.batch_loader import BatchLoader
from penteract.engine.executor.executor import Executor
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session import trainer as engine
from penteract.units import gib

WARM = 3
# Waits in the record, and the methods of `Executor` that wait.
WAITS = {"need": "wait_all_gather", "exchange": "post_p2p", "arrive": "wait_recv", "settle": "wait_sends"}
LOAD = BatchLoader.load


@dataclass
class Marks:
    """Pairs of events on the compute stream, by name: before and after."""

    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(default_factory=dict)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record an event before the context and one after it."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.pairs.setdefault(name, []).append((before, after))

    def milliseconds(self, name: str) -> list[float]:
        """The time between the events of each pair."""
        return [a.elapsed_time(b) for a, b in self.pairs.get(name, [])]


@contextmanager
def watched(marks: Marks) -> Iterator[None]:
    """Record marks around everything before the first kernel of a step, and around waits for parameters and messages."""
    begin, scales = Executor.begin, Executor.scales
    opened = list[Any]()

    def marked_begin(run: Executor) -> None:
        opened.append(marks.around("begin"))
        opened[-1].__enter__()
        begin(run)

    def marked_scales(run: Executor) -> None:
        scales(run)
        opened.pop().__exit__(None, None, None)

    def marked_wait(name: str, method: str) -> Callable[..., None]:
        real = getattr(Executor, method)

        def wait(run: Executor, *arguments: Any) -> None:
            with marks.around(name):
                real(run, *arguments)

        return wait

    with ExitStack() as stack:
        waits = {method: marked_wait(name, method) for name, method in WAITS.items()}
        for method, function in {"begin": marked_begin, "scales": marked_scales, **waits}.items():
            stack.enter_context(patch.object(Executor, method, function))
        yield


def counting(loader: BatchLoader, samples: Samples, first: int) -> list[int]:
    """Load a batch as usual, but always return the targets of this rank, so that the step sums them over ranks."""
    prefetched = loader.prefetched
    counts = LOAD(loader, samples, first)
    return counts if counts is not None or prefetched is None else prefetched.target_counts


def build(args: argparse.Namespace, rank: Rank, layout: Layout) -> tuple[engine.Trainer, Samples]:
    """A trainer of a layout, and its data."""
    model = replace(find_model(args.model), layers=args.layers) if args.layers else find_model(args.model)
    base = replace(layout, attention="cudnn", loss="chunked", elementwise="triton")
    run = RunSpec(
        model=model, layout=base, sequence_length=args.seq, data=Data(pack_documents=False),
        optimizer=Optimizer(learning_rate=args.rate), lr_schedule=LearningRateSchedule(warmup_steps=2),
        precision=Precision(dtype="bf16"),
    )  # fmt: skip
    samples, _ = open_samples(run.data, open_tokenizer(run.tokenizer), run.sequence_length, 0)
    return engine.Trainer.build(run, rank), samples


def steps(
    trainer: engine.Trainer, samples: Samples, first: int, count: int, *, counts_at_begin: bool = False
) -> dict[str, Any]:
    """Time `count` steps from number `first` on, after a warm-up: milliseconds, waits, losses."""
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


def gather_all(mine: Any, rank: Rank) -> list[Any]:
    """The values of all ranks, on each rank."""
    every: list[Any] = [None] * rank.world
    dist.all_gather_object(every, mine)
    return every


def counts(args: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """The part `counts`."""
    layout = Layout(dp=rank.world, zero=1, gradient_accumulation_steps=args.micros)
    trainer, samples = build(args, rank, layout)
    rows, first = list[dict[str, Any]](), 1
    for forced in [True] if args.counts_at_begin else [False, True, True, False]:
        row = steps(trainer, samples, first, args.steps, counts_at_begin=forced)
        first += WARM + args.steps
        rows.append({"counts_at_begin": forced, "ranks": gather_all(row, rank)})
    return {"layout": "dp=2,zero=1", "micros": args.micros, "rows": rows}


def freed(args: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """The part `freed`, with the garbage collector off: only reference counts free memory."""
    layout = Layout(dp=rank.world, zero=1, gradient_accumulation_steps=1)
    gc.collect()
    gc.disable()
    allocated = {"before": torch.cuda.memory_allocated()}
    for turn in ("first", "second"):
        trainer, samples = build(args, rank, layout)
        for n in (1, 2):
            trainer.step(n, samples, (n - 1) * layout.global_batch_size)
        trainer.run.settle_parameters()
        torch.cuda.synchronize()
        allocated[f"with the {turn}"] = torch.cuda.memory_allocated()
        del trainer, samples
        allocated[f"after the {turn}"] = torch.cuda.memory_allocated()
    gc.enable()
    return {"layout": "dp=2,zero=1", "allocated_gib": gather_all({name: gib(n) for name, n in allocated.items()}, rank)}


PARTS = {"counts": counts, "freed": freed}


def record_head(args: argparse.Namespace, rank: Rank, case: str, command: str) -> dict[str, Any]:
    """The first fields of a record: case, model, device, versions."""
    return {
        "case": case, **provenance(command, args.commit), "model": args.model, "layers": args.layers,
        "sequence_length": args.seq, "device": f"{rank.world} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }  # fmt: skip


def attempt(name: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a part, or its traceback. Afterwards memory is freed, and all ranks meet."""
    try:
        result = part()
    except Exception:
        result = {"failed": traceback.format_exc()[-1500:]}
        print(name, result["failed"], file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model; 0: all")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--micros", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after three to warm up")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--counts-at-begin", action="store_true", help="see above")
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rank = join(os.environ, "cuda")
    about = "what a step waits for on two GPUs", "benchmarks/engine_truths.py"
    record: dict[str, Any] = {**record_head(args, rank, *about), "warm": WARM, "steps": args.steps}
    for name in args.parts.split(","):
        record[name] = attempt(name, partial(PARTS[name], args, rank))
        if rank.number == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "engine_truths.json").write_text(json.dumps(record, indent=1) + "\n")
            for row in record[name].get("rows", []):
                shown = {k: v for k, v in row.items() if k != "ranks"}
                by_rank = [
                    {k: round(r[k], 3) for k in ("median_ms", "mean_begin_ms")} | r["mean_waits_ms"]
                    for r in row["ranks"]
                ]
                print(name, json.dumps(shown), json.dumps(by_rank), flush=True)
            if "rows" not in record[name]:
                print(name, json.dumps(record[name]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
