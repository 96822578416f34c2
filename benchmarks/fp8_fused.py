"""One GPU: fused FP8 linear layers (`quantise`, `fp8_linear`): correctness and speed.

    python benchmarks/fp8_fused.py --out FOLDER [--commit HASH] [--only correct,speed,sampled] [--tokens 16384]

Writes FOLDER/fp8_fused.json after each part. A part that fails writes its traceback instead. This takes about half a
minute.

Checks (`held`):

- FP8 data and scales have the same bits as those of plain torch on the CPU.
- The transposed FP8 data is the transpose of the other.
- Products are within `PRODUCT` of emulated products of the same FP8 data.
- Each phase is within `TOLERANCE` of fp32 with the same bf16 inputs, in norm. Rounding changes a number by 2.4 % on
  average in e4m3, and by 4.8 % in e5m2.

The record also has the declared and the allocated bytes of workspace. Weight gradients are first written into an fp32
bucket, then added to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import run_parts, seconds
from provenance import hexadecimal

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Format, usual
from penteract.config.precision.policy import RECIPES
from penteract.config.precision.sampled_rows import MARGIN
from penteract.engine.device.zeros import Zeros
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.quantised.casters import Casters, Fp8Data, Slopes, typed
from penteract.engine.kernels.quantised.fp8 import emulated
from penteract.engine.kernels.quantised.fp8_linear import TORCH, Fp8Kernels
from penteract.engine.kernels.triton.fusions import rotate_
from penteract.engine.kernels.triton.quantised.fp8_linear import FP8_LINEAR, TRITON
from penteract.ops.declarations import declaration_of
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

DEVICE = torch.device("cuda")
KERNELS = Layout(elementwise="triton")
FP8 = usual("tensorwise")
TOLERANCE = {"forward": 5e-2, "input_gradient": 8e-2, "weight_gradient": 8e-2}
# An input gradient may be another bf16 number, which is up to 2^-7 away.
PRODUCT = {"forward": 2e-2, "input_gradient": 2**-7, "weight_gradient": 5e-3}
ROPE = {"head_size": 128, "plain_size": 0, "theta": 5e5, "scaling": None, "rotary_columns": 40 * 128}
LINEARS: Mapping[str, tuple[tuple[int, ...], int]] = {  # Llama 3 8B: features out, and in
    "qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate-up": ((14336, 14336), 4096), "down": ((4096,), 14336)
}  # fmt: skip
SMALL: Mapping[str, tuple[tuple[int, ...], int]] = {"no whole tiles": ((272, 48), 208), **LINEARS}


class Linear:
    """The registers of one layer, in bf16. Results begin as NaN, so that an unwritten element is found."""

    def __init__(self, tokens: int, features: tuple[int, ...], width: int, *, rotated: bool = False) -> None:
        generator, total = torch.Generator(DEVICE).manual_seed(width), sum(features)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        def fp8(*shape: int) -> torch.Tensor:
            return torch.full(shape, 127, dtype=torch.uint8, device=DEVICE)

        def unset(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)

        self.x, self.whole, self.g = draw(tokens, 1, width), draw(total, width), draw(tokens, 1, total).mul_(1e-3)
        self.w = list(self.whole.split(features))
        self.cast = [fp8(tokens, 1, width), fp8(width, tokens), unset(1, dtype=torch.float32)]
        self.y, self.of_w = unset(tokens, 1, total), unset(1, dtype=torch.float32)
        self.back = [unset(tokens, 1, width), fp8(total, tokens), unset(1, dtype=torch.float32)]
        self.bucket = unset(total, width, dtype=torch.float32)
        self.into = list(self.bucket.split(features))
        self.positions = [torch.arange(tokens, device=DEVICE)[:, None]] if rotated else []
        self.env = Env(Mesh(Layout()), 0, torch.float32, zeros=Zeros(1, DEVICE))
        names, shapes = tuple(f"w{i}" for i in range(len(features))), tuple((n, width) for n in features)
        x, attrs = Spec((tokens, 1, width)), {"fp8": FP8, "features": total, **(ROPE if rotated else {})}
        cast = (Spec((tokens, 1, width), "fp8"), Spec((width, tokens), "fp8"), Spec((1,), "stat"))
        ins = (x, *cast, *(Spec((tokens, 1), "index") for _ in self.positions))
        self.quantise = Site("quantise", (x,), cast, attrs={"fp8": FP8})
        self.site = Site("fp8_linear", ins, (Spec((tokens, 1, total)), Spec((1,), "stat")), names, shapes, attrs)

    def phases(self, kernels: Mapping[str, Any] = FP8_LINEAR) -> dict[str, Callable[[], Any]]:
        cast, linear = kernels["quantise"], kernels["fp8_linear"]
        ins, carried = [self.x, *self.cast, *self.positions], [*self.cast[1:], *self.back[1:]]
        return {
            "quantise": lambda: cast.forward(self.env, self.quantise, [self.x], [], self.cast),
            "forward": lambda: linear.forward(self.env, self.site, ins, self.w, [self.y, self.of_w]),
            "input_gradient": lambda: linear.input_gradient(
                self.env, self.site, [self.of_w, self.g], self.w, self.back
            ),
            "weight_gradient": lambda: linear.weight_gradient(self.env, self.site, carried, self.into, False),
            "weight_gradient added": lambda: linear.weight_gradient(self.env, self.site, carried, self.into, True),
        }

    def results(self) -> dict[str, torch.Tensor]:
        both = (self.bucket, self.bucket)
        names = ("forward", "input_gradient", "weight_gradient", "weight_gradient added")
        return dict(zip(names, (self.y, self.back[0], *both), strict=True))

    def expected(self) -> dict[str, torch.Tensor]:
        """Results in fp32, from the bf16 values. The given gradient is that of y before its heads are rotated."""
        x, w, g = (t.float().flatten(0, -2) for t in (self.x, self.whole, self.g))
        y = (x @ w.t())[:, None]
        if self.positions:
            rotate_(self.env, self.site, y, self.positions[0], 1)
        gradient = g.t() @ x
        return {"forward": y, "input_gradient": (g @ w)[:, None], "weight_gradient": gradient,
                "weight_gradient added": 2 * gradient}  # fmt: skip


def correct() -> list[dict[str, Any]]:
    """Each phase against fp32 and against emulated products of the same FP8 data; its memory and the declared one."""
    rows: list[dict[str, Any]] = []
    for name, (features, width) in SMALL.items():
        tokens = 528 if name == "no whole tiles" else 2048
        real, twin = (Linear(tokens, features, width, rotated=name == "qkv") for _ in range(2))
        emulation, truths = twin.phases(Fp8Kernels(TRITON, emulated, rotate_).table()), real.expected()
        for phase, run in real.phases().items():
            site, known = (real.quantise if phase == "quantise" else real.site), phase.removesuffix(" added")
            about = ("forward" if phase == "quantise" else known, [s.shape for s in site.ins], site.weights, site.attrs)
            allocated = _allocated(run)
            emulation[phase]()
            declared = declaration_of(site, KERNELS).workspace(*about, RECIPES["bf16"].widths)  # type: ignore[arg-type]
            row: dict[str, Any] = {"linear": name, "phase": phase, "declared": declared, "allocated": allocated}
            if phase != "quantise":
                got, want, true = (x[phase].double() for x in (real.results(), twin.results(), truths))
                row["of_fp8"] = ((got - want).abs().max() / want.abs().max()).item()
                row["error"] = ((got - true).norm() / true.norm()).item()
                row["held"] = row["of_fp8"] < PRODUCT[known] and row["error"] < TOLERANCE[known]
            rows.append(row)
        rows += [{"linear": name, "phase": what, "held": held} for what, held in _check_fp8_data(real).items()]
        del real, twin, emulation, truths, run
        gc.collect()
    return rows


def _allocated(run: Callable[[], Any]) -> int:
    """The peak of allocated bytes during a call, in addition to those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _check_fp8_data(linear: Linear) -> dict[str, bool]:
    """Whether the FP8 data and scales of x, w and g equal those of plain torch on the CPU."""
    held = dict[str, bool]()
    given: tuple[tuple[str, torch.Tensor, Format], ...] = (
        ("x", linear.x, FP8.operand), ("w", linear.whole, FP8.operand), ("g", linear.g, FP8.gradient)
    )  # fmt: skip
    for what, x, form in given:
        rows = x.flatten(0, -2)
        ours, theirs = _cast(TRITON, rows, form), _cast(TORCH, rows.cpu(), form)
        held[f"data of {what}"] = torch.equal(ours[0].cpu(), theirs[0])
        held[f"scale of {what}"] = torch.equal(ours[2].cpu(), theirs[2])
        held[f"data of {what}, columnwise"] = torch.equal(ours[0].t(), ours[1])
        kept = {"x": linear.cast[1], "g": linear.back[1]}.get(what)
        held[f"data of {what}, kept"] = kept is None or torch.equal(kept, ours[1])
    return held


def _cast(casters: Casters, x: torch.Tensor, form: Format) -> list[torch.Tensor]:
    """x in FP8 [rows, k], the same transposed [k, rows], and its scale [1]."""
    rowwise = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    columnwise, scale = torch.empty(*x.shape[::-1], dtype=torch.uint8, device=x.device), torch.empty(1, device=x.device)
    largest = torch.zeros(1, device=x.device)
    casters.of_values.put_largest(x, largest)
    casters.of_values.put_fp8(FP8, form, x, largest, scale, Fp8Data(typed(rowwise, form), typed(columnwise, form)))
    return [rowwise, columnwise, scale]


def sampled(tokens: int) -> list[dict[str, Any]]:
    """Gradients of gate and up whose scale comes from some rows beside those whose scale comes from all: the numbers, and
    seconds. In one of two, a row that is not among them has numbers far above the margin."""
    rows: list[dict[str, Any]] = []
    generator, width = torch.Generator(DEVICE).manual_seed(3), 4096
    shape = (tokens, 2 * width)

    def draw(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    for above in (False, True):
        x = Slopes(draw(2 * width), draw(width))
        x.gradient[5] *= 2.0**12 if above else 1.0
        by_all, by_some = (
            Fp8Data(*(torch.empty(n, dtype=FORMATS["e5m2"], device=DEVICE) for n in (shape, shape[::-1])))
            for _ in range(2)
        )  # fmt: skip
        largest, zeros, of_all, scale = (torch.zeros(n, device=DEVICE) for n in (1, 2, 1, 1))
        search, put = TRITON.of_slopes.largest_of(x), TRITON.of_slopes.fp8_of(FP8, "e5m2", x, of_all)
        sample = TRITON.sampled_slopes(FP8, "e5m2", x, scale)

        def twice(search: Any = search, put: Any = put, largest: Any = largest, into: Fp8Data = by_all) -> None:
            largest.zero_()
            search(largest)
            put(largest, into)

        def once(sample: Any = sample, zeros: Any = zeros, into: Fp8Data = by_some) -> None:
            zeros.zero_()
            sample(zeros, into)

        took = {"twice": seconds(twice), "once": seconds(once)}
        exact, made = (data[0].float() * s for data, s in ((by_all, of_all), (by_some, scale)))
        ratio = (scale / of_all).item()
        held = {
            "numbers": bool(((made - exact).abs() <= scale * 2.0**-16).all()),
            "columnwise": torch.equal(by_some[0].view(torch.uint8).t(), by_some[1].view(torch.uint8)),
            "scale": ratio == 1 if above else 1 < ratio <= MARGIN,
        }
        rows.append({"of": "slopes", "above": above, "scale_above": ratio, "held": held, "seconds": took})
    return rows


def speed(tokens: int) -> list[dict[str, Any]]:
    """Seconds of whole phases; of quantisation alone, with its bandwidth; of products alone, with their rate."""
    rows: list[dict[str, Any]] = []
    for name, (features, width) in LINEARS.items():
        linear = Linear(tokens, features, width, rotated=name == "qkv")
        for phase, run in linear.phases().items():
            rows.append({"linear": name, "phase": phase, "seconds": seconds(run)})
        rows += [{"linear": name, **row} for row in (*_quantisation(linear), *_products(linear))]
        del linear, run
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _quantisation(linear: Linear) -> list[dict[str, Any]]:
    """Seconds and bandwidth of the search for the largest value, and of the quantisation of each tensor."""
    rows: list[dict[str, Any]] = []
    for what, x, form, turns in (
        ("x", linear.x, FP8.operand, (True, True)), ("w", linear.whole, FP8.operand, (True, False)),
        ("w, columnwise", linear.whole, FP8.operand, (False, True)), ("g", linear.g, FP8.gradient, (True, True)),
    ):  # fmt: skip
        flat = x.flatten(0, -2)
        largest, scale, n = torch.zeros(1, device=DEVICE), torch.empty(1, device=DEVICE), x.numel()
        rowwise, columnwise = (
            torch.empty(shape, dtype=FORMATS[form], device=DEVICE) if asked else None
            for shape, asked in zip((flat.shape, flat.shape[::-1]), turns, strict=True)
        )
        took = seconds(partial(TRITON.of_values.put_largest, flat, largest))
        rows.append({"phase": f"largest of {what}", "seconds": took, "tb_per_s": 2 * n / took * 1e-12})
        took = seconds(partial(TRITON.of_values.put_fp8, FP8, form, flat, largest, scale, Fp8Data(rowwise, columnwise)))
        moved = n * (2 + sum(turns))
        rows.append({"phase": f"data of {what}", "seconds": took, "tb_per_s": moved / took * 1e-12})
    return rows


def _products(linear: Linear) -> list[dict[str, Any]]:
    """Seconds and rate of cuBLASLt's products, with full and with fast accumulation (`fast`)."""
    tokens, width, total = linear.x.shape[0], linear.x.shape[-1], linear.g.shape[-1]
    form, other = FORMATS[FP8.operand], FORMATS[FP8.gradient]
    x, w, g = (_cast(TRITON, t.flatten(0, -2), f) for t, f in
               ((linear.x, FP8.operand), (linear.whole, FP8.operand), (linear.g, FP8.gradient)))  # fmt: skip
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - no public name yet
    rows: list[dict[str, Any]] = []
    for phase, a, b, out in (
        ("forward", x[0].view(form), w[0].view(form), linear.y), ("input_gradient", g[0].view(other), w[1].view(form),
        linear.back[0]), ("weight_gradient", g[1].view(other), x[1].view(form), linear.bucket),
        ("weight_gradient in bf16", g[1].view(other), x[1].view(form), torch.empty_like(linear.whole)),
    ):  # fmt: skip
        scales = [s[2] for s in {"forward": (x, w), "input_gradient": (g, w)}.get(phase, (g, x))]
        for fast in (True, False):
            run = partial(product, a, b.t(), *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out.flatten(0, -2))
            took = seconds(run)
            rows.append({"phase": f"product of {phase}", "fast": fast, "seconds": took,
                         "tflops": 2 * tokens * width * total / took * 1e-12})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--commit", default="", type=hexadecimal, help="for the record")
    parser.add_argument("--only", default="correct,speed,sampled", help="parts to run")
    parser.add_argument("--tokens", type=int, default=16384, help="of the speed part")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {
        "commit": given.commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "tokens": given.tokens, "tolerance": TOLERANCE,
    }  # fmt: skip
    parts: dict[str, Callable[[], Any]] = {
        "correct": correct,
        "speed": partial(speed, given.tokens),
        "sampled": partial(sampled, given.tokens),
    }
    for name in given.only.split(","):
        found |= run_parts(name, {name: parts[name]})
        (given.out / "fp8_fused.json").write_text(json.dumps(found, indent=1))
        for row in found[name] if isinstance(found[name], list) else ():
            print(_line(row), flush=True)


def _line(row: Mapping[str, Any]) -> str:
    fields = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "seconds"]
    took = row.get("seconds", {})
    several = took if isinstance(took, dict) else {"": took}
    return " · ".join([*fields, *(f"{name} {1e3 * s:.3f} ms" for name, s in several.items())])


if __name__ == "__main__":
    main()
