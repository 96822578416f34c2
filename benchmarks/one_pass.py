"""One GPU: Triton kernels that read and write each tensor once, and products into fp32 buckets, against the reference
kernels.

    python benchmarks/one_pass.py [--out FILE.json] [--only rms_norm,swiglu,...] [--tiny]

For each call:

- the largest error of both kernels in bf16 against the reference kernel in fp32 on the same inputs: the norm of the
  difference over the norm;
- whether two calls give the same bits;
- the measured workspace less the declared one, in bytes;
- milliseconds of both kernels, and GB/s by the declared traffic.

On a CPU, use `--tiny` with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / d) for d in ("src", "tests")]

import torch

from op_kernels.cases import Case, In, draw, x
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.dtypes import dtype_of
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.registry import kernel
from penteract.ops.declarations import OPS, implementation
from penteract.ops.spec import Spec
from penteract.ops.tape import Phase, Site

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-2  # of a bf16 result; errors of fp32 results are much smaller
WIDTHS = RECIPES["bf16"].widths


def cases(n: int) -> Iterator[Case]:
    """All cases. Sizes are divided by `n`."""
    t, d, f, v = 16384 // n, 4096 // n, 14336 // n, 128256 // n
    rope = {"head_size": 128, "plain_size": 0, "theta": 5e5, "scaling": None}
    for width in (2048 // n, d):
        yield Case("rms_norm", f"{width}", (x(t, 1, width),), ((width,),), {"epsilon": 1e-5})
    yield Case("rms_norm", "32 heads", (x(t, 1, 32 * 128),), ((128,),), {"epsilon": 1e-5})
    yield Case("swiglu", f"{f}", (x(t, 1, f), x(t, 1, f)))
    yield Case("swiglu", "768, of experts", (x(8 * t, 768 // n), x(8 * t, 768 // n)))
    yield Case("rope", "32 heads", (x(t, 1, 32 * 128), draw(131072, t, 1)), (), rope)
    yield Case("rope", "8 heads", (x(t, 1, 8 * 128), draw(131072, t, 1)), (), rope)
    yield Case("embedding", f"{v}", (draw(v, t, 1),), ((v, d),), {"axis": ""})
    yield Case("embedding", "few ids", (draw(64, t, 1),), ((v, d),), {"axis": ""})
    rows, targets = t // 4, draw(v, t // 4, 1, low=-9)
    logits, stats = x(rows, 1, v), In("stat", (rows, 1), torch.full((rows, 1), 12.5, dtype=torch.float64))
    g = In("stat", (), torch.tensor(0.01, dtype=torch.float64))
    yield Case("row_max", f"{v}", (logits,))
    yield Case("exp_sum", f"{v}", (logits, stats, targets), (), {"axis": "tp"})
    yield Case("exp_sum", "50257", (x(rows, 1, 50257 // n), stats, targets), (), {"axis": "tp"})
    sums = In("stat", (2, rows, 1), torch.rand(2, rows, 1, dtype=torch.float64) + 0.5)
    yield Case("negative_log_likelihood", f"{rows} tokens", (sums, stats, targets), (), {"z": 1e-4})
    yield Case("cross_entropy_gradient", f"{v}", (logits, stats, targets, g), (), {"axis": "tp"})
    yield Case("linear", f"{f}", (x(t, 1, d),), ((f, d),))
    yield Case("logits", f"{v}", (x(t // 4, 1, d),), ((v, d),), {"columns": 65536})


@dataclass
class Call:
    """A case with its tensors in bf16."""

    case: Case
    site: Site = field(init=False)
    env: Env = field(init=False)

    def __post_init__(self) -> None:
        case, declaration = self.case, OPS[self.case.op_name].declaration
        specs = tuple(Spec(i.shape, i.role) for i in case.ins)
        outs, extras = declaration.results(specs, case.weights, case.attrs)
        names = tuple(f"w{i}" for i in range(len(case.weights)))
        self.site = Site(case.op_name, specs, (*outs, *extras), names, case.weights, case.attrs)
        self.env = Env(Mesh(Layout()), 0, torch.float32)
        generator = torch.Generator(DEVICE).manual_seed(1)

        def draw_tensor(shape: Any, role: Any, value: Any = None) -> torch.Tensor:
            new = torch.randn(shape, generator=generator, device=DEVICE) if value is None else value.to(DEVICE)
            return new.to(dtype_of(role, "bf16"))

        self.ins = [draw_tensor(i.shape, i.role, i.value) for i in case.ins]
        self.weights = [draw_tensor(w, "compute") for w in case.weights]
        self.gradients = [draw_tensor(self.site.outs[i].shape, "compute") for i in declaration.gradients(case.attrs)]

    def tensors(self, phase: Phase, *, wide: bool) -> tuple[list[Any], ...]:
        """The arguments of a phase: inputs, weights, results. `wide`: in fp32."""
        role = "fp32" if wide else "bf16"
        declaration, kept = OPS[self.case.op_name].declaration, list[torch.Tensor]()
        names = {"input_gradient": declaration.input_keeps, "weight_gradient": declaration.weight_keeps}
        for name in names.get(phase, ()):
            extra = torch.rand(self.site.outs[-1].shape, generator=torch.Generator().manual_seed(2)) + 0.5  # type: ignore[arg-type]
            kept.append(self.ins[int(name[-1])] if name.startswith("in") else extra.to(DEVICE))
        inputs = {"forward": self.ins}.get(phase, [*kept, *self.gradients])
        specs = {"forward": self.site.outs, "input_gradient": [self.site.ins[i] for i in declaration.differentiable]}
        outs = [torch.empty(s.shape, dtype=dtype_of(s.role, role), device=DEVICE) for s in specs.get(phase, ())]  # type: ignore[arg-type]
        if phase == "weight_gradient":
            outs = [torch.zeros(w, device=DEVICE) for w in self.case.weights]
        floats = [[y.float() if wide and y.is_floating_point() else y for y in some] for some in (inputs, self.weights)]
        return floats[0], floats[1], outs

    def run(self, one: TorchKernel, phase: Phase, tensors: tuple[list[Any], ...], *, add: bool = False) -> None:
        """Run a phase with a kernel. `add`: weight gradients are added."""
        ins, weights, outs = tensors
        if phase == "weight_gradient":
            one.weight_gradient(self.env, self.site, ins, outs, add)  # type: ignore[misc]
        else:
            getattr(one, phase)(self.env, self.site, ins, weights, outs)


def errors(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error in norm."""
    pairs = ((a.double(), b.double()) for a, b in zip(got, expected, strict=True))
    return max(((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs)


def workspace(call: Call, one: TorchKernel, phase: Phase, tensors: tuple[list[Any], ...]) -> int:
    """Bytes that are requested from the allocator at the peak of a call, in addition to those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call.run(one, phase, tensors)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def milliseconds(call: Call, one: TorchKernel, phase: Phase, tensors: tuple[list[Any], ...]) -> float:
    """Median time of a call, by CUDA events. Weight gradients are added."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(13)]
    for begin, end in marks:
        begin.record()
        call.run(one, phase, tensors, add=True)
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks[3:])


def row(call: Call, phase: Phase) -> dict[str, Any]:
    """The row of a phase."""
    name, arguments = call.case.op_name, (phase, [i.shape for i in call.case.ins], call.case.weights, call.case.attrs)
    chosen, declared = implementation(call.site, Layout(elementwise="triton"))
    ours, plain = kernel(name, chosen, "cuda"), kernel(name, OPS[name].implementations[-1], "cuda")
    expected, tensors = call.tensors(phase, wide=True), call.tensors(phase, wide=False)
    call.run(plain, phase, expected)
    found: dict[str, Any] = {"case": str(call.case), "phase": phase, "kernel": chosen.name}
    call.run(plain, phase, tensors)
    found["error of reference"] = errors(tensors[-1], expected[-1])
    call.run(ours, phase, tensors)
    found["error"], first = errors(tensors[-1], expected[-1]), [y.clone() for y in tensors[-1]]
    call.run(ours, phase, tensors)
    found["same again"] = all(torch.equal(a, b) for a, b in zip(first, tensors[-1], strict=True))
    if phase == "weight_gradient":
        call.run(ours, phase, tensors, add=True)
        found["error added"] = errors([y / 2 for y in tensors[-1]], expected[-1])
    found["held"] = max(found["error"], found.get("error added", 0.0)) < TOLERANCE and found["same again"]
    del expected, first
    if DEVICE.type == "cuda":
        found["workspace - declared"] = workspace(call, ours, phase, tensors) - declared.workspace(*arguments, WIDTHS)
        found["ms"], found["ms of reference"] = (milliseconds(call, k, phase, tensors) for k in (ours, plain))
        if kernels := declared.traffic(*arguments, WIDTHS):
            found["GB/s"] = sum(k.times * k.moved for k in kernels) / found["ms"] / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="the file of the record")
    parser.add_argument("--only", default="", help="ops to test")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    for case in cases(256 if args.tiny else 1):
        if args.only and case.op_name not in args.only.split(","):
            continue
        if DEVICE.type == "cpu" and case.op_name in ("linear", "logits"):
            continue  # products into fp32 need a GPU
        call, reference = Call(case), OPS[case.op_name].implementations[-1]
        for phase in ("forward", "input_gradient", "weight_gradient"):
            one = kernel(case.op_name, reference, DEVICE.type)
            if getattr(one, phase) is None or (phase == "weight_gradient" and not case.weights):
                continue
            rows.append(row(call, phase))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"held: {sum(r['held'] for r in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
