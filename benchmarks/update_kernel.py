"""One GPU: AdamW's update of a shard by the Triton kernel and by plain torch: correctness and speed.

    python benchmarks/update_kernel.py --out FOLDER [--commit HASH] [--only bf16,fp16,...] [--elements 268435456]

Then it compares ways to compile the plain kernel (`forms`), and times the sum of squares for the gradients' norm
(`squares`): update_forms.py. Writes FOLDER/update_kernel.json after each part. A part that fails writes its traceback
instead; the others still run. With `--device cpu --elements 5000` the kernels run in Triton's interpreter. This tests the
script; its times mean nothing.

Check (`held`): from the same state, both kernels give the same result up to rounding. In fp32, the difference is less than
`TOLERANCE` of the terms that are summed. In narrower dtypes, fewer than `SHARE` of the elements differ, each by one rounding
step; larger differences are allowed only if they are within `TOLERANCE` of the terms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import run_parts, seconds
from provenance import hexadecimal
from update_forms import chosen, compared, squares

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import MOMENT_BLOCK, RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import dtype_of
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.loss_scaling import LossScale
from penteract.engine.state.state import Flat
from penteract.ops.params import Param, Shard
from penteract.parallel.data import Bucket
from penteract.step.update import bytes_moved, is_sliced

POLICIES = {
    "bf16": RECIPES["bf16"],
    "bf16_pure": RECIPES["bf16_pure"],
    "moments_int8": replace(RECIPES["bf16"], moments="int8"),
    "moments_bf16": replace(RECIPES["bf16"], moments="bf16"),
    "fp16": RECIPES["fp16"],
}
TOLERANCE = 2.0**-17
SHARE = 1e-3
WIDTH = 4096  # columns of the matrix on this rank; it is sharded over two
SPEC = Optimizer(learning_rate=1e-3)


def shard(n: int, policy: Policy, device: torch.device) -> Flat:
    """A shard of a random matrix. Its moments are zero."""
    width = min(WIDTH, n)
    q = Param("w", (n // width + 1, 2 * width), (Shard(1, "tp"),))
    places = (ParameterSlice.of(q, Mesh(Layout(tp=2)), 1, at=0, begin=0, count=n),) if policy.stochastic else ()
    parameter = (torch.randn(n, device=device) * 0.02).to(dtype_of("parameter", policy))
    master = parameter.to(dtype_of("master", policy)) if policy.master else parameter
    moments = {kind: torch.zeros(n, dtype=dtype_of("moment", policy), device=device) for kind in ("mean", "square")}
    quantised = policy.moments == "int8"
    scales = {kind: torch.zeros(n // MOMENT_BLOCK, device=device) for kind in moments if quantised}
    bucket = Bucket((q,), (0,), n, (0,), True, False, (0,), (0,), moments=policy.moments)
    gradient = torch.zeros(n, dtype=dtype_of("gradient", policy), device=device)
    return Flat(
        bucket, range(n), parameter, gradient, None, None, master, moments, scales, is_sliced(policy), places,  # type: ignore[arg-type]
    )  # fmt: skip


def draw(flat: Flat, scale: float) -> None:
    """Draw gradients, with magnitudes from 1e-6 to 1."""
    g = flat.gradient
    g.copy_(torch.randn(len(g), device=g.device).mul_(torch.rand(len(g), device=g.device).mul_(-6).mul_(2.3).exp_()))
    g.mul_(scale)


class Kernels:
    """A shard in one policy, with AdamW in plain torch and with the Triton kernel."""

    def __init__(self, n: int, policy: Policy, device: torch.device) -> None:
        from penteract.engine.optim.shard_update import Update

        self.flat, scaling = shard(n, policy, device), None
        if policy.loss_scale:
            scaling = LossScale(policy.loss_scale, policy.growth_every, device)
            scaling.begin()
        self.scale = policy.loss_scale or 1.0
        self.norm = torch.full((), 4.0, device=device)
        self.torch, self.kernel = (AdamW(SPEC, device, 0, scaling, kernel) for kernel in (None, Update(SPEC)))
        for adamw in (self.torch, self.kernel):
            adamw.rate.fill_(SPEC.learning_rate)

    def runs(self) -> dict[str, Callable[[], None]]:
        """An update with each kernel, as functions."""
        kernels = {"torch": self.torch, "kernel": self.kernel}
        return {
            name: lambda adamw=adamw: adamw.update(self.flat, adamw.factors(self.norm))
            for name, adamw in kernels.items()
        }


def correct(kernels: Kernels) -> list[dict[str, Any]]:
    """Compare the second update by both kernels, from the state after the first."""
    draw(kernels.flat, kernels.scale)
    kernels.torch.update(kernels.flat, kernels.torch.factors(kernels.norm))
    draw(kernels.flat, kernels.scale)
    for adamw in (kernels.torch, kernels.kernel):
        adamw.step.fill_(2)
    before, twin = wide(kernels.flat), deepcopy(kernels.flat)
    kernels.torch.update(kernels.flat, kernels.torch.factors(kernels.norm))
    kernels.kernel.update(twin, kernels.kernel.factors(kernels.norm))
    rows: list[dict[str, Any]] = []
    then, now = wide(kernels.flat), wide(twin)
    stored, other = ({"master": f.master, "parameter": f.own_parameter} | f.moments for f in (kernels.flat, twin))
    for kind, was in before.items():
        gap = (now[kind] - then[kind]).abs()
        row: dict[str, Any] = {"what": kind, "dtype": str(stored[kind].dtype), "largest_difference": gap.max().item()}
        row["moved"] = (then[kind] != was).double().mean().item()
        summed = was.abs().add_(then[kind].abs()).add_(SPEC.learning_rate if kind in ("master", "parameter") else 0)
        gap.div_(summed.clamp_(min=1e-30))
        if stored[kind].dtype == torch.float32:
            row["relative"] = gap.max().item()
            row["held"] = row["relative"] < TOLERANCE
        else:
            integer = torch.uint8 if stored[kind].dtype == torch.uint8 else torch.int16
            apart = (stored[kind].view(integer).int() - other[kind].view(integer).int()).abs()
            row |= {"differing": (apart > 0).double().mean().item(), "steps": apart.max().item()}
            row["far"] = ((apart > 1) & (gap > TOLERANCE)).sum().item()
            row["held"] = row["differing"] < SHARE and not row["far"]
        rows.append(row)
    rows.append(overflow(kernels))
    return rows


def overflow(kernels: Kernels) -> dict[str, Any]:
    """With a norm that is not finite, the kernel must change nothing."""
    flat = kernels.flat
    kept = [flat.parameter, flat.master, *flat.moments.values(), *flat.scales.values()]
    before = [x.clone() for x in kept]
    kernels.kernel.update(flat, kernels.kernel.factors(torch.full_like(kernels.norm, float("inf"))))
    return {"what": "overflow", "held": all(torch.equal(x, y) for x, y in zip(before, kept, strict=True))}


def wide(flat: Flat) -> dict[str, torch.Tensor]:
    """Copies of the state in fp32, by kind."""
    whole = slice(0, len(flat.master))
    kinds: dict[str, torch.Tensor] = {kind: flat.read(kind, whole, torch.float32) for kind in flat.moments}
    return {
        kind: x.float().clone() for kind, x in (kinds | {"master": flat.master, "parameter": flat.parameter}).items()
    }


def speed(kernels: Kernels, policy: Policy) -> list[dict[str, Any]]:
    """Seconds of an update, the bytes that it must read and write, and the bytes that it allocates."""
    n = len(kernels.flat.master)
    size = bytes_moved(n, policy) - n * policy.widths["gradient"]  # the gradient is read once more, for the norm
    rows: list[dict[str, Any]] = []
    for name, run in kernels.runs().items():
        row: dict[str, Any] = {"kernel": name, "bytes": size, "allocated": allocated(run, kernels.norm.device)}
        row["seconds"] = seconds(run, kernels.norm.device.type)
        row["bytes_a_second"] = size / row["seconds"]
        rows.append(row)
    return rows


def allocated(run: Callable[[], None], device: torch.device) -> int:
    """The peak of allocated bytes during an update, in addition to those before it."""
    if device.type != "cuda":
        with Storages() as seen:
            run()
        return seen.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(elements: int, policy: Policy, device: torch.device) -> dict[str, Any]:
    """Correctness and speed in one policy."""
    kernels = Kernels(elements, policy, device)
    return {"correct": correct(kernels), "speed": speed(kernels, policy)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--only", default=",".join(POLICIES))
    parser.add_argument("--elements", type=int, default=2**28)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is first imported
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "commit": args.commit, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "cuda": torch.version.cuda, "elements": args.elements, "tolerance": TOLERANCE,
        "share": SHARE, "policies": {},
    }  # fmt: skip
    for name in filter(None, args.only.split(",")):
        policy = POLICIES[name]
        whole = args.elements // MOMENT_BLOCK * MOMENT_BLOCK if policy.moments == "int8" else args.elements
        row = run_parts(name, {"all": partial(measured, whole, policy, device)})
        found["policies"][name] = {"precision": policy.name, **row.pop("all"), **row}
        (args.out / "update_kernel.json").write_text(json.dumps(found, indent=1))
        print(_line(name, found["policies"][name]), flush=True)
    found |= run_parts("forms", {"forms": partial(compared, device), "squares": partial(squares, device)})
    found["form"] = run_parts("form", {"chosen": partial(chosen, found["forms"])})["chosen"]
    (args.out / "update_kernel.json").write_text(json.dumps(found, indent=1))
    for row in [*found["forms"], *found["squares"], found["form"]]:
        print(row)


def _line(name: str, policy_row: dict[str, Any]) -> str:
    parts = [name]
    if "correct" in policy_row:
        parts.append(
            f"{sum(not row['held'] for row in policy_row['correct'])} of {len(policy_row['correct'])} not held"
        )
    for row in policy_row.get("speed", ()):
        parts.append(
            f"{row['kernel']} {row['seconds'] * 1e3:.2f} ms, {row['bytes_a_second'] * 1e-12:.2f} TB/s,"
            f" {row['allocated'] / 2**20:.1f} MiB allocated"
        )
    return " · ".join([*parts, *(["failed"] if "failed" in policy_row else [])])


if __name__ == "__main__":
    main()
