"""One GPU: kernels of routing and of experts' products at the sizes of Qwen3-30B-A3B, held to the reference, then timed.

    python benchmarks/expert_kernels.py --out FOLDER [--only permute,expert_linear,...] [--tiles] [--tiny]

Of each call: the largest error in bf16 against the reference kernel in fp32 on the same inputs, by the norm of the
difference over the norm, or for indices whether they are the same; whether two calls agree to the bit; bytes of
workspace beside the declared ones; milliseconds; TFLOP/s of products, GB/s of all else by the declared traffic.
Experts have uneven rows, and some have none. `--tiles`: quack's products with other tiles too. `--tiny`: small sizes,
on a CPU too (TRITON_INTERPRET=1). FOLDER gets `expert_kernels.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

import torch

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels import experts as reference
from penteract.engine.kernels import grouped_experts
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.registry import kernel
from penteract.ops.declarations import OPS, OpDeclaration, implementation
from penteract.ops.spec import Spec
from penteract.ops.tape import Phase, Site

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = RECIPES["bf16"].widths
TOLERANCE = 2e-2
ENV = Env(Mesh(Layout()), 0, torch.float32)
TILES = ((128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False), (128, 160, True))


@dataclass(frozen=True)
class Sizes:
    tokens: int = 16384
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    ffn: int = 768

    @property
    def copies(self) -> int:
        return self.tokens * self.top_k


@dataclass
class Call:
    """A phase of an op with its tensors in bf16: `ins`, `weights`, what it writes."""

    op_name: str
    what: str
    phase: Phase
    ins: list[torch.Tensor]
    weights: list[torch.Tensor]
    outs: list[torch.Tensor]
    attrs: dict[str, Any]
    about: list[torch.Size]  # shapes of the op's ins

    @property
    def site(self) -> Site:
        shapes = tuple(tuple(w.shape) for w in self.weights)
        return Site(self.op_name, tuple(Spec(tuple(s)) for s in self.about), (), (), shapes, self.attrs)

    def run(self, one: TorchKernel, *, wide: bool = False, add: bool = False) -> list[torch.Tensor]:
        def made(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [t.float() if wide and t.is_floating_point() else t for t in tensors]

        outs = [torch.empty_like(t, dtype=torch.float32) if t.is_floating_point() else torch.empty_like(t)
                for t in self.outs] if wide else self.outs  # fmt: skip
        if self.phase == "weight_gradient":
            assert one.weight_gradient is not None
            one.weight_gradient(ENV, self.site, made(self.ins), outs, add)
        else:
            getattr(one, self.phase)(ENV, self.site, made(self.ins), made(self.weights), outs)
        return outs

    def shapes(self) -> tuple[Any, ...]:
        return self.phase, [tuple(s) for s in self.about], [tuple(w.shape) for w in self.weights], self.attrs


def calls(n: Sizes) -> Iterator[Call]:
    """Routing, then products."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    def empty(*shape: int, like: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=like, device=DEVICE)

    liked = torch.randn(n.experts, generator=generator, device=DEVICE)
    liked[3], liked[-1] = -1e9, -1e9  # nobody's
    chance = torch.rand(n.tokens, n.experts, generator=generator, device=DEVICE)
    chosen = (chance.log().neg().log().neg() + 0.5 * liked).topk(n.top_k, -1).indices[:, None]  # [tokens, 1, k]
    flat = chosen.reshape(-1)
    order, counts = torch.argsort(flat, stable=True), torch.bincount(flat, minlength=n.experts)
    attrs, token = {"top_k": n.top_k, "experts": n.experts}, (n.tokens, 1, n.hidden)
    about = [chosen.shape]
    yield Call("expert_permutation", "", "forward", [chosen], [], [order.clone(), counts.clone()], attrs, about)
    yield Call("expert_offsets", "", "forward", [counts], [], [empty(n.experts + 1, like=torch.int32)], {"ranks": 1},
               [counts.shape])  # fmt: skip
    x, rows, w = draw(*token), draw(n.copies, n.hidden), draw(n.tokens, 1, n.top_k).softmax(-1)
    about = [x.shape, order.shape]
    yield Call("permute", "", "forward", [x, order], [], [torch.empty_like(rows)], attrs, about)
    yield Call("permute", "", "input_gradient", [order, rows], [], [torch.empty_like(x)], attrs, about)
    about = [rows.shape, w.shape, order.shape]
    yield Call("unpermute", "", "forward", [rows, w, order], [], [torch.empty_like(x)], attrs, about)
    made = [torch.empty_like(rows), torch.empty_like(w)]
    yield Call("unpermute", "", "input_gradient", [rows, w, order, x], [], made, attrs, about)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    for what, width, out in (("gate", n.hidden, n.ffn), ("down", n.ffn, n.hidden)):
        x, g, matrix = draw(n.copies, width), draw(n.copies, out), draw(n.experts, out, width)
        about = [x.shape, offsets.shape]
        yield Call("expert_linear", what, "forward", [x, offsets], [matrix], [torch.empty_like(g)], {}, about)
        yield Call("expert_linear", what, "input_gradient", [offsets, g], [matrix], [torch.empty_like(x)], {}, about)
        bucket = [empty(*matrix.shape, like=torch.float32)]
        yield Call("expert_linear", what, "weight_gradient", [x, offsets, g], [matrix], bucket, {}, about)


def plain(call: Call) -> TorchKernel:
    """What is right: the reference, and products one by one."""
    table = grouped_experts.EMULATED if call.op_name == "expert_linear" else reference.EXPERTS
    return table[call.op_name]


def tried(call: Call, *, tiles: bool) -> Iterator[tuple[str, TorchKernel, OpDeclaration]]:
    """(name, kernel, declaration) of what computes a call."""
    if call.op_name == "expert_offsets":
        yield "reference", reference.EXPERTS[call.op_name], OPS[call.op_name].declaration
        return
    layouts = [Layout(elementwise="triton")]
    if call.op_name == "expert_linear":
        layouts = [Layout(experts="grouped"), *([Layout(experts="quack")] if DEVICE.type == "cuda" else [])]
    for layout in layouts:
        chosen, declared = implementation(call.site, layout)
        at = DEVICE.type if DEVICE.type in chosen.kernels else "cuda"
        yield chosen.name, kernel(call.op_name, chosen, at), declared
        if tiles and chosen.name == "quack":
            for tile in TILES:
                how = grouped_experts.Quack(tile=lambda _, tile=tile: tile)
                yield f"quack {tile}", grouped_experts.expert_products(how), declared


def errors(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        if not a.is_floating_point():
            return float(not torch.equal(a, b))
        return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-6)).item()

    return max(error(a, b) for a, b in zip(got, wanted, strict=True))


def workspace(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of calls, by the device's clock."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(13)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks[3:])


def row(call: Call, name: str, one: TorchKernel, declared: OpDeclaration, wanted: list[torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {"op": f"{call.op_name} {call.what}".strip(), "phase": call.phase, "kernel": name}
    for out in call.outs:
        out.fill_(float("nan") if out.is_floating_point() else -1)
    first = [y.clone() for y in call.run(one)]
    found["error"] = errors(first, wanted)
    found["same again"] = all(torch.equal(a, b) for a, b in zip(first, call.run(one), strict=True))
    if call.phase == "weight_gradient":
        found["error added"] = errors([y / 2 for y in call.run(one, add=True)], wanted)
    found["held"] = max(found["error"], found.get("error added", 0.0)) < TOLERANCE and found["same again"]
    if DEVICE.type != "cuda":
        return found
    found["workspace - declared"] = workspace(lambda: call.run(one)) - declared.workspace(*call.shapes(), WIDTHS)
    found["ms"] = milliseconds(lambda: call.run(one))
    if flops := declared.flops(*call.shapes()):
        found["TFLOP/s"] = flops / found["ms"] / 1e9
    elif kernels := declared.traffic(*call.shapes(), WIDTHS):
        found["GB/s"] = sum(k.times * k.moved for k in kernels) / found["ms"] / 1e6
    return found


def zeros_by_torch(n: Sizes) -> dict[str, Any]:
    """Whether torch's grouped product writes zeros for experts without rows: then nothing need be cleared."""
    a = torch.randn(n.hidden, 512, device=DEVICE).bfloat16()
    b = torch.randn(512, n.ffn, device=DEVICE).bfloat16()
    junk = [torch.full((4, n.hidden, n.ffn), float("nan"), device=DEVICE).bfloat16() for _ in range(3)]
    del junk  # what the allocator hands out next is not zero
    offsets = torch.tensor([0, 256, 256, 512, 512], dtype=torch.int32, device=DEVICE)
    made = grouped_experts.by_torch(a, b, offsets)
    return {"op": "torch._grouped_mm", "zeros for experts without rows": not made[[1, 3]].any().item(), "held": True}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    n = Sizes(tokens=48, experts=6, top_k=2, hidden=32, ffn=16) if asked.tiny else Sizes()
    folder, rows = Path(asked.out), list[dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)

    def note(found: dict[str, Any]) -> None:
        rows.append(found)
        print(json.dumps(found), flush=True)
        (folder / "expert_kernels.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")

    note(zeros_by_torch(n))
    for call in calls(n):
        if asked.only and call.op_name not in asked.only.split(","):
            continue
        wanted = call.run(plain(call), wide=True)
        for name, one, declared in tried(call, tiles=asked.tiles):
            try:
                note(row(call, name, one, declared, wanted))
            except Exception:  # a tile that the package refuses, or has too little memory for
                note({"op": call.op_name, "phase": call.phase, "kernel": name, "held": False,
                      "failed": traceback.format_exc()[-600:]})  # fmt: skip
    print(f"held: {sum(r['held'] for r in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
