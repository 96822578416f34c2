"""One GPU: what the host needs for a launch of Triton, by its JIT and as a bound call makes it; and for whole steps.

    python benchmarks/host_launch.py --out FILE [--commit HASH]

launches  µs of the host for one launch of three kernels, medians over rounds: by `kernel[grid](..)`, and by what `bind`
          of `engine/device/launches.py` gives. `equal`: whether both left the same bits in all tensors
steps     ms of a step of a model of 0.6B whose sequences are so short that the device waits for the host, in FP8 and
          bf16: with launches by the JIT, and bound. `host` until the step is asked for, `whole` until it is done

With `--device cpu` the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which binds nothing, and steps are left
out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts
from provenance import provenance

from penteract.config.layout import FUSIONS, Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import LARGEST
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Data, Precision, RunSpec
from penteract.engine.data.blank import Blank
from penteract.engine.device import launches
from penteract.engine.kernels.quantised.quantise import TINY
from penteract.engine.kernels.triton import norm
from penteract.engine.kernels.triton.optimizer import adamw
from penteract.engine.kernels.triton.quantised import fp8_linear
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer

MODEL = ModelSpec(
    layers=28, hidden_size=1024, heads=16, kv_heads=8, head_size=64, ffn_size=4096, vocab_size=32000,
    initial_std=0.02,
)  # fmt: skip
LENGTH = 256  # tokens of a step
ROUNDS, TIMES = 15, 60  # launches of a round fit into the device's queue
STEPS, WARM = 12, 4
Case = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, by name


def cases(device: torch.device) -> dict[str, Case]:
    """Launches of kernels with few arguments, many, and most."""
    rows, k, n = 512, 1024, 2**16
    random = partial(torch.randn, device=device)
    byte = partial(torch.zeros, dtype=torch.float8_e4m3fn, device=device)
    x, largest, scale = random(rows, k).bfloat16(), torch.full((1,), 4.0, device=device), torch.ones(1, device=device)
    form, factors = adamw.FORM, torch.tensor([1.0, 0.5, 0.1, 0.95, 1.0, 0.999, 1e-3], device=device)
    return {
        "_add_up": (
            norm._add_up, (32,), (random(64, k), torch.zeros(k, device=device), 64),
            {"C": k, "ADD": False, "ROWS": 64, "COLUMNS": 32, "num_warps": 8},
        ),
        "_quantise_tile": (
            fp8_linear._quantise_tile, (rows // fp8_linear.ROWS, k // fp8_linear.COLUMNS),
            (x, largest, scale, byte(rows, k), byte(k, rows), rows, k, k, k, rows, LARGEST["e4m3"], TINY),
            {"POWERS": False, "R": fp8_linear.ROWS, "K": fp8_linear.COLUMNS, "num_warps": fp8_linear.WARPS},
        ),
        "_update": (
            adamw._update, (n // form.tile,),
            (random(n), random(n), random(n).abs(), random(n), torch.zeros(n, dtype=torch.bfloat16, device=device),
             factors, torch.zeros((), device=device), n // 16, 0.05, 1e-8, 0, 0),
            {"WIDTH": 0, "TILE": form.tile, "GRAIN": 16, "DECAY": True, "SPLIT": False, "EXACT": form.exact,
             "STREAM": form.stream, "num_warps": form.warps, "enable_fp_fusion": form.fused},
        ),
    }  # fmt: skip


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, in other memory."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether all tensors have the same bits."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)]
    return all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in pairs)


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def microseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of the host, for one launch: the median of rounds, of each the mean; the device's queue is empty before each."""
    took = list[float]()
    rounds, times = (ROUNDS, TIMES) if device.type == "cuda" else (1, 1)
    for _ in range(rounds):
        settle(device)
        begun = time.perf_counter()
        for _ in range(times):
            run()
        took.append((time.perf_counter() - begun) * 1e6 / times)
    return median(took)


def one_launch(case: Case, device: torch.device) -> dict[str, Any]:
    """A row of `launches`."""
    kernel, grid, args, named = case
    others = copied(args)
    bound = launches.bind(kernel, grid, *others, **named)
    for _ in range(3):  # the third of the bound ones is surely not the JIT's
        kernel[grid](*args, **named)
        bound()
    settle(device)
    row: dict[str, Any] = {"equal": same(args, others), "bound": bound.direct is not None}
    row |= {
        "jit_us": microseconds(lambda: kernel[grid](*args, **named), device),
        "bound_us": microseconds(bound, device),
    }
    return row | {"ratio": row["jit_us"] / row["bound_us"]}


def trainer(precision: str, device: torch.device) -> Trainer:
    """One micro-batch on one GPU."""
    fuse = tuple(f for f in FUSIONS if f != "fp8" or precision != "bf16")
    layout = Layout(elementwise="triton", attention="cudnn", fuse=fuse, loss="chunked", recompute=("swiglu",))
    run = RunSpec(
        model=MODEL, sequence_length=LENGTH, precision=Precision.of(RECIPES[precision]), layout=layout,
        data=Data(pack_documents=False),
    )  # fmt: skip
    return Trainer.build(run, Rank(0, 1, device, None))


def milliseconds(one: Trainer, first: int, device: torch.device) -> dict[str, Any]:
    """Of steps: medians."""
    host, whole, losses, samples = list[float](), list[float](), list[float](), Blank(LENGTH)
    for n in range(first, first + WARM + STEPS):
        settle(device)
        gc.collect()
        begun = time.perf_counter()
        outcome = one.start(n, samples, 0)  # type: ignore[arg-type]
        host.append((time.perf_counter() - begun) * 1e3)
        settle(device)
        whole.append((time.perf_counter() - begun) * 1e3)
        losses.append(outcome().loss)
    return {"host_ms": median(host[WARM:]), "whole_ms": median(whole[WARM:]), "losses": losses}


def steps(precision: str, device: torch.device) -> dict[str, Any]:
    """A row of `steps`, of two runs that begin alike."""
    made: dict[str, Any] = {}
    for name in ("jit", "bound"):
        torch.manual_seed(0)
        with patch.object(launches, "was_read", lambda name=name: name == "bound"):
            made[name] = milliseconds(trainer(precision, device), 1, device)
        gc.collect()
        torch.cuda.empty_cache()
    made["equal"] = made["jit"]["losses"] == made["bound"]["losses"]
    return made | {"ratio": made["jit"]["host_ms"] / made["bound"]["host_ms"]}


def main() -> None:
    args = form_options(__doc__ or "").parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    torch.set_grad_enabled(False)
    found = {**provenance("python benchmarks/host_launch.py", args.commit), **measured_on(args)}
    found |= run_parts("launches", {name: partial(one_launch, case, device) for name, case in cases(device).items()})
    if device.type == "cuda":
        found |= run_parts(
            "steps", {f"step {name}": partial(steps, name, device) for name in ("fp8_tensorwise", "bf16")}
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    for name, row in found.items():
        print(name, row)


if __name__ == "__main__":
    main()
