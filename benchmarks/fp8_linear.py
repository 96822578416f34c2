"""One GPU: FP8 linear layers (without fusion) against emulated products of the same FP8 data, and their time.

    python benchmarks/fp8_linear.py --out FOLDER [--commit HASH] [--only tensorwise,rowwise,...] [--tokens 8192]

Writes FOLDER/fp8_linear.json after each recipe. A recipe that fails writes its traceback instead; the others still run.
Triton kernels quantise (`kernels.elementwise = "triton"`). `speed of the reference` has the times with plain torch.

Checks (`held`):

- Each of the three products is within `TOLERANCE` of an emulated product of the same FP8 data and scales: the largest
  difference over the largest value. Results are rounded to bf16, by at most 2^-9, and a GPU may accumulate the sums of a
  forward pass in fewer bits. A wrong scale or memory layout gives much larger errors.
- The FP8 data of the Triton kernels has the same bits as that of plain torch on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import run_parts, seconds
from provenance import hexadecimal

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import KINDS, Fp8, usual
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.dense import DENSE
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.quantised import fp8 as fp8_kernels
from penteract.engine.kernels.quantised.quantise import TORCH, Operand, OperandView, Quantiser, scale_count
from penteract.engine.kernels.triton.quantised.quantise import TRITON
from penteract.ops.declarations import declaration_of
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

DEVICE = torch.device("cuda")
KERNELS = Layout(elementwise="triton")
TOLERANCE = {"forward": 2e-2, "input_gradient": 5e-3, "weight_gradient": 5e-3}
LINEARS = {"q, o": (4096, 4096), "k, v": (1024, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}  # Llama 3 8B
SMALL = {"whole blocks, odd count": (384, 640), "tall": (2048, 128)}
PHASES = ("forward", "input_gradient", "weight_gradient")


class Linear:
    """The tensors of one linear layer in bf16. Its features differ in magnitude."""

    def __init__(self, tokens: int, out: int, width: int, fp8: Fp8 | None, device: torch.device = DEVICE) -> None:
        generator = torch.Generator().manual_seed(out + width)

        def draw(*shape: int) -> torch.Tensor:
            sizes = torch.exp(torch.randn(shape[-1], generator=generator))
            return (torch.randn(*shape, generator=generator) * sizes).bfloat16().to(device)

        self.x, self.w, self.g = draw(tokens, 1, width), draw(out, width), draw(tokens, 1, out).mul_(1e-3)
        attrs: dict[str, Any] = {"fp8": fp8, "cut": None} if fp8 else {}
        specs = (Spec((tokens, 1, width)),), (Spec((tokens, 1, out)),)
        self.site = Site("linear", *specs, ("w",), ((out, width),), attrs)
        self.env = Env(Mesh(Layout()), 0, torch.float32)
        self.env.past_amax, self.env.amax = ({"w": torch.zeros(3, device=device)} for _ in range(2))
        self.y, self.dx = torch.empty_like(self.g), torch.empty_like(self.x)
        self.dw = torch.empty(out, width, device=device)

    def phases(self, kernel: Any) -> dict[str, Callable[[], Any]]:
        """The three phases as functions."""
        return {
            "forward": lambda: kernel.forward(self.env, self.site, [self.x], [self.w], [self.y]),
            "input_gradient": lambda: kernel.input_gradient(self.env, self.site, [self.g], [self.w], [self.dx]),
            "weight_gradient": lambda: kernel.weight_gradient(self.env, self.site, [self.x, self.g], [self.dw], False),
        }

    def results(self) -> dict[str, torch.Tensor]:
        """The result of each phase."""
        return dict(zip(PHASES, (self.y, self.dx, self.dw), strict=True))


def correct(fp8: Fp8) -> list[dict[str, Any]]:
    """Products against emulated ones, FP8 data against that of a CPU, and the declared and allocated workspace."""
    rows: list[dict[str, Any]] = []
    for name, (out, width) in (SMALL | {"gate, up": LINEARS["gate, up"]}).items():
        tokens = 1024
        real, twin = (Linear(tokens, out, width, fp8) for _ in range(2))
        emulated = twin.phases(fp8_kernels.scaled(fp8_kernels.emulated))
        for phase, run in real.phases(fp8_kernels.scaled(fp8_kernels.real, TRITON)).items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            allocated = torch.cuda.max_memory_allocated() - before
            emulated[phase]()
            got, want = (x.results()[phase].double() for x in (real, twin))
            about = (phase, [(tokens, 1, width)], real.site.weights, real.site.attrs, RECIPES["bf16"].widths)
            error = ((got - want).abs().max() / want.abs().max()).item()
            rows.append({
                "linear": name, "phase": phase, "error": error, "held": error < TOLERANCE[phase],
                "declared": declaration_of(real.site, KERNELS).workspace(*about), "allocated": allocated,
            })  # fmt: skip
        rows += check_fp8_data(fp8, name, real)
        del real, twin, emulated, run
        gc.collect()
    return rows


def check_fp8_data(fp8: Fp8, name: str, linear: Linear) -> list[dict[str, Any]]:
    """Whether the weight and the gradient, quantised for the input gradient, equal those of a CPU."""
    if fp8.kind == "delayed":
        return []
    views = {"w": (linear.w.t(), fp8.operand, True), "g": (linear.g.view(-1, linear.g.shape[-1]), fp8.gradient, False)}
    rows: list[dict[str, Any]] = []
    for what, (x, form, square) in views.items():
        operands: list[Operand] = []
        for rows_of, quantiser in ((x, TRITON), (x.cpu(), TORCH)):
            view = OperandView(1, rows_of, form, square)
            scale = torch.zeros(scale_count(fp8, view), device=rows_of.device)
            quantiser.put_largest(fp8, view, scale)
            operands.append(quantiser.quantised(fp8, view, scale))
        same = [torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*operands, strict=True)]
        rows.append({"linear": name, "phase": f"data and scales of {what}", "held": all(same)})
    return rows


def speed(fp8: Fp8 | None, tokens: int, quantiser: Quantiser = TRITON) -> list[dict[str, Any]]:
    """Seconds of whole phases. In FP8 also those of the products alone; the rest is quantisation."""
    rows: list[dict[str, Any]] = []
    for name, (out, width) in LINEARS.items():
        linear, flops = Linear(tokens, out, width, fp8), 2 * tokens * out * width
        kept: list[tuple[Any, ...]] = []

        def product(*arguments: Any, kept: list[tuple[Any, ...]] = kept) -> None:
            kept[:] = [arguments]
            fp8_kernels.real(*arguments)

        for phase, run in linear.phases(fp8_kernels.scaled(product, quantiser) if fp8 else DENSE["linear"]).items():
            row: dict[str, Any] = {"linear": name, "phase": phase, "seconds": seconds(run)}
            if fp8:
                row["product_seconds"] = seconds(partial(fp8_kernels.real, *kept[0]))
                row["quantising_seconds"] = row["seconds"] - row["product_seconds"]
                shapes = ([(tokens, 1, width)], linear.site.weights)
                row["declared_bytes"] = declaration_of(linear.site, KERNELS).passes(
                    phase, *shapes, RECIPES["bf16"].widths
                )
            row["product_tflops"] = flops / row.get("product_seconds", row["seconds"]) * 1e-12
            rows.append(row)
        kept.clear()
        del linear, run
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal, help="for the record")
    parser.add_argument("--only", default="bf16," + ",".join(KINDS), help="recipes to run")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {
        "commit": args.commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "tokens": args.tokens, "tolerance": TOLERANCE, "recipes": {},
    }  # fmt: skip
    for name in args.only.split(","):
        fp8 = None if name == "bf16" else usual(name)
        parts: dict[str, Callable[[], Any]] = {"speed": partial(speed, fp8, args.tokens)}
        if fp8:
            slow = partial(speed, fp8, args.tokens, TORCH)
            parts = {"correct": partial(correct, fp8), **parts, "speed of the reference": slow}
        found["recipes"][name] = run_parts(name, parts)
        (args.out / "fp8_linear.json").write_text(json.dumps(found, indent=1))
        print(_line(name, found["recipes"][name]), flush=True)


def _line(name: str, row: dict[str, Any]) -> str:
    parts = [name]
    if isinstance(row.get("correct"), list):
        worst = max(one.get("error", 0.0) for one in row["correct"])
        parts.append(f"worst error {worst:.1e}, {sum(not one['held'] for one in row['correct'])} not held")
    if isinstance(row["speed"], list):
        whole = sum(one["seconds"] for one in row["speed"])
        parts.append(f"all phases of all linear layers {whole * 1e3:.2f} ms")
        if isinstance(row.get("speed of the reference"), list):
            slow = sum(one["seconds"] for one in row["speed of the reference"])
            parts.append(f"{slow * 1e3:.2f} ms with plain torch")
            parts.append(f"products {sum(one['product_seconds'] for one in row['speed']) * 1e3:.2f} ms")
    return " · ".join(parts)


if __name__ == "__main__":
    main()
