"""One GPU: FP8 products by the algorithm that we choose of those that cuBLASLt offers, beside torch's choice.

    python benchmarks/fp8_products.py --out OUT.json [--commit HASH] [--cases A1_fp8_fast] [--rounds 4]

- **correct**: the products of a layer of Llama-3-8B, whose results are to be within `TOLERANCE` of torch's in norm. `ours`:
  whether an algorithm of ours made them.
- **steps**: steps of `beside_torchtitan.py` with both choices in turns, in one process: the medians, and the milliseconds
  of all FP8 products of a step in a profile, by kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from beside_ours import RandomBatches, run_of
from beside_sides import CASES, Case
from provenance import hexadecimal, provenance
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from penteract.config.precision.fp8 import usual
from penteract.engine.kernels.quantised import cublaslt, fp8
from penteract.engine.kernels.quantised.quantise import Operand
from penteract.engine.rank.rank import join
from penteract.engine.session.garbage import collected_between_steps
from penteract.engine.session.trainer import Trainer

TOLERANCE = 2e-3
FP8 = replace(usual("tensorwise"), fast_accumulation=True)
TOKENS, WIDTH, FFN = 16_384, 4096, 14_336
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
LINEARS = {"qkv": (6144, WIDTH), "o": (WIDTH, WIDTH), "gate, up": (2 * FFN, WIDTH), "down": (WIDTH, FFN)}
WARM, IN_A_ROW = 3, 5  # steps


def multiply(a: Operand, b: Operand, out: torch.Tensor) -> bool:
    """a · bᵀ as a run has it; whether an algorithm of ours did it."""
    made = list[bool]()

    def noted(*about: Any) -> bool:
        made.append(cublaslt.multiplied(*about))
        return made[-1]

    with patch.object(fp8, "multiplied", noted):
        fp8.real(FP8, a, b, out, True)
    return made == [True]


def correct() -> Iterator[dict[str, Any]]:
    """A row for each product of each linear layer."""
    draw = torch.Generator("cuda").manual_seed(1)

    def new(rows: int, k: int, dtype: torch.dtype, scale: float) -> Operand:
        values = torch.randn(rows, k, generator=draw, device="cuda", dtype=BF16)
        return Operand((values * 30).to(dtype), torch.full((1,), scale, device="cuda"))

    for linear, (features, width) in LINEARS.items():
        for phase, m, n, k, of_a, of_out in (
            ("forward", TOKENS, features, width, E4M3, BF16),
            ("input gradient", TOKENS, width, features, E5M2, BF16),
            ("weight gradient", features, width, TOKENS, E5M2, FP32),
        ):
            a, b = new(m, k, of_a, 0.25), new(n, k, E4M3, 0.125)
            out, other = (torch.full((m, n), torch.nan, dtype=of_out, device="cuda") for _ in range(2))
            ours = multiply(a, b, out)
            with patch.object(fp8, "multiplied", lambda *about: False):
                fp8.real(FP8, a, b, other, True)
            error = ((out - other).float().norm() / other.float().norm()).item()
            yield {"linear": linear, "phase": phase, "ours": ours, "error": error, "held": error < TOLERANCE}


class Steps:
    """Steps of a case in this process."""

    def __init__(self, case: Case) -> None:
        self.run, self.samples, self.taken = run_of(case, {}, {}), RandomBatches(case), 0
        self.trainer = Trainer.build(self.run, join({}, "cuda"))
        self.losses = list[float]()

    def take(self, count: int) -> list[float]:
        """Milliseconds of so many."""
        marks, pending = [self._mark()], list[Any]()
        with collected_between_steps():
            for _ in range(count):
                begin = self.taken * self.run.layout.global_batch_size
                self.taken += 1
                pending.append(self.trainer.start(self.taken, self.samples, begin))
                marks.append(self._mark())
                if len(pending) > 1:
                    self.losses.append(pending.pop(0)().loss)
        self.losses.append(pending.pop(0)().loss)
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def _mark(self) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made


def products_of(steps: Steps) -> dict[str, Any]:
    """Milliseconds of the FP8 products of a step, and of each of their kernels."""
    count = 2
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps.take(count)
    by_kernel = Counter[str]()
    for event in found.events():
        if event.device_type == DeviceType.CUDA and event.name.startswith(("nvjet_sm90_qq", "nvjet_sm90_qr")):
            by_kernel[event.name] += event.device_time / 1e3 / count
    return {"ms": by_kernel.total(), "kernels": {name: round(ms, 3) for name, ms in by_kernel.most_common()}}


def steps(case: Case, rounds: int) -> dict[str, Any]:
    """Both choices in turns."""
    taken = Steps(case)
    choices = {"torch": lambda *about: False, "ours": cublaslt.multiplied}
    times = {name: list[float]() for name in choices}
    for turn in range(-1, rounds):  # the first is not measured
        for name in reversed(choices) if turn % 2 else choices:
            with patch.object(fp8, "multiplied", choices[name]):
                found = taken.take(WARM + IN_A_ROW if turn < 0 else IN_A_ROW)
                times[name] += found[1:] if turn >= 0 else []
    row: dict[str, Any] = {"case": case.name, "losses": [taken.losses[0], taken.losses[-1]]}
    for name, multiplied in choices.items():
        with patch.object(fp8, "multiplied", multiplied):
            of_products = products_of(taken)
        of_steps = times[name]
        row[name] = {"median_ms": median(of_steps), "spread_ms": [min(of_steps), max(of_steps)], "steps": len(of_steps),
                     "products": of_products}  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--cases", default="A1_fp8_fast")
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {
        "case": "FP8 products", **provenance("python benchmarks/fp8_products.py", asked.commit),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "tolerance": TOLERANCE,
    }  # fmt: skip
    record["correct"] = list(correct())
    print(json.dumps(record["correct"]), flush=True)
    torch.cuda.empty_cache()
    record["steps"] = list[Any]()
    for name in asked.cases.split(","):
        record["steps"].append(steps(CASES[name], asked.rounds))
        print(json.dumps(record["steps"][-1]), flush=True)
        asked.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
