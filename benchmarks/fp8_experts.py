"""One GPU: FP8 products of experts against emulated products of the same FP8 data, for any number of rows, and their time.

    python benchmarks/fp8_experts.py --out FOLDER [--commit HASH]

Writes FOLDER/fp8_experts.json. The check (`held`) is that of `fp8_linear.py`. Times are those of forward and input gradient
of Mixtral's gate projection, with eight experts of 2048 rows each, in FP8 and in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from fp8_linear import TOLERANCE
from measuring import run_parts, seconds
from provenance import hexadecimal

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Fp8, usual
from penteract.engine.kernels.experts import EXPERTS, Splits
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.quantised.fp8 import emulated, real
from penteract.engine.kernels.quantised.fp8_experts import FOUR, in_fours, scaled_experts
from penteract.engine.kernels.quantised.quantise import TORCH
from penteract.engine.kernels.triton.quantised.quantise import TRITON
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

DEVICE = torch.device("cuda")
PHASES = ("forward", "input_gradient")
SMALL = ([37, 0, 128, 5, 1001], (512, 256))  # rows of each expert, (features out, in)
LARGE = ([2048] * 8, (14336, 4096))


class Experts:
    """The tensors of an expert layer, in bf16."""

    def __init__(self, rows: list[int], shape: tuple[int, int], fp8: Fp8 | None) -> None:
        out, width = shape
        torch.manual_seed(out)
        total, self.splits = sum(rows), Splits([], [], [rows])
        self.x, self.g, self.w = (
            torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)
            for size in ((total, width), (total, out), (len(rows), out, width))
        )
        specs = (Spec((total, width)), Spec((), "host")), (Spec((total, out)),)
        attrs: dict[str, Any] = {"fp8": fp8, "cut": None} if fp8 else {}
        self.site = Site("expert_linear", *specs, ("w",), (tuple(self.w.shape),), attrs)
        self.env = Env(Mesh(Layout()), 0, torch.float32)
        self.results = {"forward": torch.empty_like(self.g), "input_gradient": torch.empty_like(self.x)}

    def run(self, kernel: TorchKernel, phase: str) -> None:
        """Run a phase with a kernel."""
        ins = [self.x, self.splits] if phase == "forward" else [self.splits, self.g]
        getattr(kernel, phase)(self.env, self.site, ins, [self.w], [self.results[phase]])


def correct(fp8: Fp8) -> list[dict[str, Any]]:
    """Real products against emulated ones."""
    ours, theirs = Experts(*SMALL, fp8), Experts(*SMALL, fp8)
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        ours.run(scaled_experts(in_fours(real), TRITON, multiple=FOUR), phase)
        theirs.run(scaled_experts(emulated, TORCH), phase)
        got, want = (x.results[phase].double() for x in (ours, theirs))
        error = ((got - want).abs().max() / want.abs().max()).item()
        rows.append({"phase": phase, "rows": SMALL[0], "error": error, "held": error < TOLERANCE[phase]})
    return rows


def speed(fp8: Fp8 | None) -> dict[str, float]:
    """Seconds of both phases; without a recipe, in bf16."""
    kernel = scaled_experts(in_fours(real), TRITON, multiple=FOUR) if fp8 else EXPERTS["expert_linear"]
    experts = Experts(*LARGE, fp8)
    return {phase: seconds(lambda phase=phase: experts.run(kernel, phase)) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal, help="for the record")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {
        "command": "python benchmarks/fp8_experts.py --out FOLDER", "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "tolerance": {phase: TOLERANCE[phase] for phase in PHASES}, "speed_of": LARGE, "recipes": {},
    }  # fmt: skip
    for name in ("bf16", "rowwise", "blockwise"):
        fp8 = None if name == "bf16" else usual(name)
        parts: dict[str, Callable[[], Any]] = {"correct": partial(correct, fp8)} if fp8 else {}
        found["recipes"][name] = run_parts(name, {**parts, "seconds": partial(speed, fp8)})
        print(name, json.dumps(found["recipes"][name]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fp8_experts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
