"""Layouts that are predicted to take 95 to 100 % of the memory that tensors may take: each has to train.

    python benchmarks/at_the_limit.py --out OUT.json --cases 24              # small models, each under a limit of its own
    torchrun --nproc-per-node 2 benchmarks/at_the_limit.py --out OUT.json    # the same on two GPUs
    python benchmarks/at_the_limit.py --out OUT.json --cases 6 --own         # models of up to 8B: the limit is the card

Cases are drawn by a seed: shape, sequences, dtype, recomputation, and on two GPUs ZeRO, tensor, pipeline and context
parallelism. The limit of a case follows from what is predicted for it: tensors may take all but the headroom of
`penteract plan`, and take a drawn share of that. Under a limit torch's allocator gives no more than that limit; what is
beside it on the device (the CUDA context, NCCL) is not limited. Three steps have to end with a finite loss.
`--first N` begins with case N, so that several processes may divide the cases.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from drawn_sweeps import NAMES, SHAPES, two_cards
from provenance import hexadecimal, provenance

from penteract.config.hardware import HEADROOM, Cluster, cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import toml_value
from penteract.config.run import RunSpec
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadInput
from penteract.measure.bench.ranks.random_samples import RandomSamples
from penteract.readings.estimator import Estimator
from penteract.readings.memory.process_memory import process_memory
from penteract.units import gib

SEED, STEPS, LEAST, MOST = 20261126, 3, 1.5, 14.0
FAST = {"kernels.elementwise": "triton", "kernels.attention": "cudnn", "kernels.fuse": "all"}
SMALL = ((512, 8, 8, 4, 64, 2048), (768, 12, 12, 4, 64, 3072), (1024, 6, 8, 8, 128, 4096), (1536, 8, 12, 4, 128, 4096))
OWN = "the card's own"


def words_of(rng: random.Random, gpus: int, shapes: tuple[tuple[int, ...], ...], small: bool) -> dict[str, Any]:
    """A drawn case: keys of a run file and their values."""
    shape = {f"model.{name}": value for name, value in zip(NAMES, rng.choice(shapes), strict=True)}
    length = rng.choice((512, 1024, 2048, 4096) if small else (4096, 8192, 16_384))
    size = rng.choice((1, 2, 4))
    found = {
        **shape, "model.tied": rng.choice((True, False)), "batch.sequence_length": length,
        "precision.dtype": rng.choice(("bf16", "fp8_tensorwise")), "batch.micro_batch_size": size,
        "batch.global_batch_size": 8 if gpus > 1 else size * rng.choice((1, 2)),
        "memory.recompute": rng.choice(("none", "swiglu", "full")), "data.pack_documents": False,
    }  # fmt: skip
    return found | (two_cards(rng) if gpus > 1 else {})


class Cases:
    """The cases of one seed, with what is predicted for them."""

    def __init__(self, gpus: int, own: Cluster | None, device: str = "cuda") -> None:
        self.gpus, self.own = gpus, own
        self.same = {"precision.device": device} | (FAST if device == "cuda" else {})
        self.node = own or cluster(f"{gpus}xH200")
        self.rng = random.Random(f"{SEED} {gpus} {own is not None}")

    def draw(self) -> tuple[RunSpec, dict[str, Any]]:
        """The next case that is legal, and near the limit."""
        while True:
            share = self.rng.uniform(0.95, 1.0)
            words = self.same | words_of(self.rng, self.gpus, SHAPES if self.own else SMALL, self.own is None)
            try:
                found = self._grown(words) if self.own else self._priced(words)
            except BadInput:
                continue
            if found is None:
                continue
            run, row = found
            if self.own is None:
                limit = row["allocated"] / share / (1 - HEADROOM)
                if not LEAST <= limit / 2**30 <= MOST:
                    continue
                row |= {"limit": int(limit), "share_of_usable": round(share, 4)}
            return run, row

    def _priced(self, words: dict[str, Any]) -> tuple[RunSpec, dict[str, Any]]:
        run = resolve(None, "llama-3.2-1b", [f"{k}={toml_value(v)}" for k, v in words.items()], self.gpus).run
        prices = Estimator(run.model, self.node, run.sequence_length, run.precision.policy)
        estimate = prices.estimate(run.layout)
        beside = process_memory(prices, estimate)
        return run, {"words": words, "allocated": estimate.allocated, "reserved": beside.reserved if beside else None,
                     "limit": OWN}  # fmt: skip

    def _grown(self, words: dict[str, Any]) -> tuple[RunSpec, dict[str, Any]] | None:
        """The case with as many layers as fit; None if it then takes less than 95 % of what tensors may take."""
        usable, fits, exceeds = self.node.usable(), 0, 256
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self._priced(words | {"model.layers": middle})[1]["allocated"] <= usable:
                fits = middle
            else:
                exceeds = middle
        if not fits:
            return None
        run, row = self._priced(words | {"model.layers": fits})
        row["share_of_usable"] = round(row["allocated"] / usable, 4)
        return (run, row) if row["share_of_usable"] >= 0.95 else None


def trained(run: RunSpec, rank: Rank, limit: int | str) -> dict[str, Any]:
    """Three steps under a limit: their losses and the memory that they took, or why they ended."""
    cuda = rank.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        if isinstance(limit, int):
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    samples = RandomSamples(run.model.vocab_size, run.sequence_length, 0)
    try:
        trainer = Trainer.build(run, rank)
        size, losses = run.layout.global_batch_size, list[float]()
        for number in range(1, STEPS + 1):
            losses.append(trainer.start(number, samples, (number - 1) * size)().loss)
    except torch.OutOfMemoryError as error:
        return {"trained": False, "why": str(error)[:300]}
    if not all(map(math.isfinite, losses)):
        return {"trained": False, "why": f"losses {losses}"}
    if not cuda:
        return {"trained": True}
    free, total = torch.cuda.mem_get_info()
    return {"trained": True, "measured": torch.cuda.max_memory_allocated(),
            "measured_reserved": torch.cuda.max_memory_reserved(), "device_in_use": total - free}  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many trained, and how near to the limit they were."""
    errors = [abs(row["measured"] / row["allocated"] - 1) for row in rows if "measured" in row]
    shares = [row["share_of_usable"] for row in rows]
    return {"cases": len(rows), "trained": sum(row["trained"] for row in rows),
            "share_of_usable": [min(shares), max(shares)],
            "allocated_error_mean": round(sum(errors) / len(errors), 6) if errors else None}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="no case begins after this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", type=hexadecimal, default="")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    gpus, begun = int(os.environ.get("WORLD_SIZE", "1")), time.monotonic()
    rank = join(os.environ if gpus > 1 else {}, asked.device)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
    cases = Cases(gpus, cluster(f"{gpus}xH{'200' if 'H200' in name else '100'}") if asked.own else None, asked.device)
    record = {**provenance("python benchmarks/at_the_limit.py", asked.commit), "device": f"{gpus} x {name}",
              "torch": torch.__version__, "headroom": HEADROOM, "rows": []}  # fmt: skip
    for number in range(asked.first + asked.cases):
        run, row = cases.draw()
        if number < asked.first:
            continue
        late = torch.tensor(float(time.monotonic() - begun > asked.seconds))
        rank.largest(late)
        if late:
            break
        began = time.monotonic()
        found = trained(run, rank, row["limit"])
        gc.collect()
        if asked.device == "cuda":
            torch.cuda.empty_cache()
        record["rows"].append({"case": number, **row, **found, "took_s": round(time.monotonic() - began, 1)})
        if rank.number == 0:
            print(json.dumps(record["rows"][-1]), flush=True)
            asked.out.write_text(json.dumps(record | {"summary": summary(record["rows"])}, indent=1) + "\n")
    if rank.number == 0:
        rows = record["rows"]
        print(json.dumps(summary(rows)), f"allocated {gib(sum(row['allocated'] for row in rows)):.1f} GiB in all")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
