"""One GPU: what the host needs for each call of a step, by its name in a timeline.

    python benchmarks/host_calls.py --out FILE.json [--commit HASH] [--cases bf16,fp8,packages,experts]

Sequences are so short that the device waits for the host, and its queue is empty before each step. `us`: the median of
all calls of that name in all steps but the first ones, in microseconds; `calls`: how many a step has. `[launch.of]` of
the hardware files is made of these rows. With `--device cpu` (kernels of plain torch) the script can be tried.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts
from provenance import provenance

from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import toml_value
from penteract.engine.executor import profiled
from penteract.engine.rank.rank import join
from penteract.engine.session.trainer import Trainer
from penteract.measure.bench.ranks.random_samples import RandomSamples

LENGTH, STEPS, WARM = 256, 10, 4
DENSE = {"model.layers": 8, "model.hidden_size": 1024, "model.heads": 8, "model.kv_heads": 4, "model.head_size": 128,
         "model.ffn_size": 4096, "model.tied": False}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("llama-3.2-1b", DENSE | {"precision.dtype": "bf16"}),
    "fp8": ("llama-3.2-1b", DENSE | {"precision.dtype": "fp8_tensorwise", "memory.recompute": "full"}),
    "packages": (
        "llama-3.2-1b",
        DENSE | {"precision.dtype": "bf16", "kernels.attention": "fa4", "kernels.fuse": "norm,add,mlp,qkv,loss,glu"},
    ),
    "experts": ("qwen3-30b-a3b", {"model.layers": 4, "precision.dtype": "bf16", "kernels.experts": "quack"}),
}
FAST = {"kernels.elementwise": "triton", "kernels.attention": "cudnn", "kernels.fuse": "all"}


class CallTimes:
    """Stands for torch's record_function: seconds of what is inside, by name."""

    def __init__(self) -> None:
        self.found = defaultdict[str, list[float]](list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.found[name.partition(" (")[0]].append(time.perf_counter() - begun)


def case(name: str, device: str) -> dict[str, Any]:
    """A row."""
    preset, words = CASES[name]
    words = words | {"precision.device": device, "batch.sequence_length": LENGTH, "batch.micro_batch_size": 1,
                     "batch.global_batch_size": 1, "data.pack_documents": False}  # fmt: skip
    if device == "cuda":
        words = FAST | words
    else:
        words.pop("kernels.experts", None)
    run = resolve(None, preset, [f"{key}={toml_value(value)}" for key, value in words.items()], 1).run
    torch.manual_seed(0)
    trainer, times, host = Trainer.build(run, join({}, device)), CallTimes(), list[float]()
    trainer.observed = profiled.ProfiledExecutor
    samples, losses = RandomSamples(run.model.vocab_size, LENGTH, 0), list[float]()
    with patch.object(profiled, "record_function", times):
        for number in range(1, WARM + STEPS + 1):
            if number == WARM + 1:
                times.found.clear()
            if device == "cuda":
                torch.cuda.synchronize()
            gc.collect()
            begun = time.perf_counter()
            outcome = trainer.start(number, samples, number - 1)
            host.append(1e3 * (time.perf_counter() - begun))
            losses.append(outcome().loss)
    layout = run.layout
    return {
        "case": name, "kernels": {"attention": layout.attention, "elementwise": layout.elementwise, "experts": layout.experts},
        "host_ms": round(median(host[WARM:]), 3), "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "calls": {name: {"calls": len(each) // STEPS, "us": round(1e6 * median(each), 1)} for name, each in times.found.items()},
    }  # fmt: skip


def main() -> None:
    parser = form_options("What the host needs for each call of a step.")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found = {**provenance("python benchmarks/host_calls.py", args.commit), **measured_on(args)}
    parts = run_parts("cases", {name: partial(case, name, args.device) for name in args.cases.split(",")})
    found |= {"took": round(parts.pop("took"), 1), "rows": list(parts.values())}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        print(json.dumps({key: value for key, value in row.items() if key != "calls"}))


if __name__ == "__main__":
    main()
