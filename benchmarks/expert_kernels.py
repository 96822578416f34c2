"""One GPU: kernels of routing and of experts' matrix products, at the sizes of Qwen3-30B-A3B: correctness and speed.

    python benchmarks/expert_kernels.py --out FOLDER [--only permute,expert_linear,...] [--tiles] [--tiny]

Writes FOLDER/expert_kernels.json. For each call:

- the largest error in bf16 against the reference kernel in fp32 on the same inputs: the norm of the difference over the
  norm; for indices, the share that differs, of which a router may have a few: its logits are sums in another order;
- whether two calls give the same bits;
- the measured workspace less the declared one, in bytes;
- milliseconds, and of a weight gradient those of one that is added; what is planned for them; TFLOP/s of products; GB/s of
  all other kernels, by their declared traffic.

Experts have different numbers of rows, and some have none. On a CPU, use `--tiny` with TRITON_INTERPRET=1.
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

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.moe import experts as reference
from penteract.engine.kernels.moe import grouped_experts
from penteract.engine.kernels.registry import kernel
from penteract.ops.declarations import OPS, OpDeclaration, implementation
from penteract.ops.declarations.declaration import CallShapes
from penteract.ops.spec import Spec
from penteract.ops.tape import Phase, Site
from penteract.readings.costs.rates import Rates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
WIDTHS = RECIPES["bf16"].widths
TOLERANCE, FEW = 2e-2, 1e-3
ENV = Env(Mesh(Layout()), 0, torch.float32)
RATES = Rates.of(cluster("1xH100" if "H100" in NAME else "1xH200"), "bf16")
TILES = ((128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False), (128, 160, True))


@dataclass(frozen=True)
class Sizes:
    """Tokens of a batch, and the sizes of the model."""

    tokens: int = 16384
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    ffn: int = 768

    @property
    def copies(self) -> int:
        """Token copies that are routed."""
        return self.tokens * self.top_k


@dataclass
class Call:
    """A phase of an op, with its tensors in bf16."""

    op_name: str
    what: str
    phase: Phase
    ins: list[torch.Tensor]
    weights: list[torch.Tensor]
    outs: list[torch.Tensor]
    attrs: dict[str, Any]
    in_shapes: list[torch.Size]  # of the op's inputs

    @property
    def site(self) -> Site:
        """The call as a site of a tape."""
        shapes = tuple(tuple(w.shape) for w in self.weights)
        return Site(self.op_name, tuple(Spec(tuple(s)) for s in self.in_shapes), (), (), shapes, self.attrs)

    def run(self, one: TorchKernel, *, wide: bool = False, add: bool = False) -> list[torch.Tensor]:
        """Run the phase with a kernel. -> its results. `wide`: in fp32; `add`: weight gradients are added."""

        def converted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [t.float() if wide and t.is_floating_point() else t for t in tensors]

        outs = [torch.empty_like(t, dtype=torch.float32) if t.is_floating_point() else torch.empty_like(t)
                for t in self.outs] if wide else self.outs  # fmt: skip
        if self.phase == "weight_gradient":
            assert one.weight_gradient is not None
            one.weight_gradient(ENV, self.site, converted(self.ins), outs, add)
        else:
            getattr(one, self.phase)(ENV, self.site, converted(self.ins), converted(self.weights), outs)
        return outs

    def shapes(self) -> tuple[Any, ...]:
        """The arguments of a declaration: phase, shapes of inputs and weights, attributes."""
        return self.phase, [tuple(s) for s in self.in_shapes], [tuple(w.shape) for w in self.weights], self.attrs


def calls(n: Sizes) -> Iterator[Call]:
    """All calls: routing, then matrix products."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    def empty(*shape: int, like: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=like, device=DEVICE)

    bias = torch.randn(n.experts, generator=generator, device=DEVICE)
    bias[3], bias[-1] = -1e9, -1e9  # these experts get no rows
    noise = torch.rand(n.tokens, n.experts, generator=generator, device=DEVICE)
    chosen = (noise.log().neg().log().neg() + 0.5 * bias).topk(n.top_k, -1).indices[:, None]  # [tokens, 1, k]
    flat = chosen.reshape(-1)
    order, counts = torch.argsort(flat, stable=True), torch.bincount(flat, minlength=n.experts)
    attrs, token = {"top_k": n.top_k, "experts": n.experts}, (n.tokens, 1, n.hidden)
    shapes = [chosen.shape]
    yield Call("expert_permutation", "", "forward", [chosen], [], [order.clone(), counts.clone()], attrs, shapes)
    yield Call("expert_offsets", "", "forward", [counts], [], [empty(n.experts + 1, like=torch.int32)], {"ranks": 1},
               [counts.shape])  # fmt: skip
    yield from _router(n, draw, empty)
    x, rows, w = draw(*token), draw(n.copies, n.hidden), draw(n.tokens, 1, n.top_k).softmax(-1)
    shapes = [x.shape, order.shape]
    yield Call("permute", "", "forward", [x, order], [], [torch.empty_like(rows)], attrs, shapes)
    yield Call("permute", "", "input_gradient", [order, rows], [], [torch.empty_like(x)], attrs, shapes)
    shapes = [rows.shape, w.shape, order.shape]
    yield Call("unpermute", "", "forward", [rows, w, order], [], [torch.empty_like(x)], attrs, shapes)
    gradients = [torch.empty_like(rows), torch.empty_like(w)]
    yield Call("unpermute", "", "input_gradient", [rows, w, order, x], [], gradients, attrs, shapes)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    for what, width, out in (("gate", n.hidden, n.ffn), ("down", n.ffn, n.hidden)):
        x, g, matrix = draw(n.copies, width), draw(n.copies, out), draw(n.experts, out, width)
        shapes = [x.shape, offsets.shape]
        yield Call("expert_linear", what, "forward", [x, offsets], [matrix], [torch.empty_like(g)], {}, shapes)
        yield Call("expert_linear", what, "input_gradient", [offsets, g], [matrix], [torch.empty_like(x)], {}, shapes)
        bucket = [empty(*matrix.shape, like=torch.float32)]
        yield Call("expert_linear", what, "weight_gradient", [x, offsets, g], [matrix], bucket, {}, shapes)


def _router(n: Sizes, draw: Callable[..., torch.Tensor], empty: Callable[..., torch.Tensor]) -> Iterator[Call]:
    """A router's calls: four sequences, softmax, normalised weights, a balance loss."""
    about = {"top_k": n.top_k, "experts": n.experts, "score": "softmax", "normalize": True, "balance": "loss", "bias": "",
             "scale": 1.0, "groups": 1, "top_groups": 1, "group_score": "max"}  # fmt: skip
    some, x, w = (n.tokens // 4, 4), draw(n.tokens // 4, 4, n.hidden), draw(n.experts, n.hidden) / n.hidden**0.5
    weights, index = empty(*some, n.top_k), empty(*some, n.top_k, like=torch.int64)
    scores, choices = empty(*some, n.experts, like=torch.float32), empty(4, n.experts, like=torch.int64)
    made = [weights, index, scores, choices]
    yield Call("router", "", "forward", [x], [w], [torch.empty_like(t) for t in made], about, [x.shape])
    site = Site("router", (Spec(tuple(x.shape)),), (), (), (tuple(w.shape),), about)
    reference.router(ENV, site, [x], [w], made)
    slopes = draw(*some, n.experts).float() / n.experts
    gradients = [torch.empty_like(x), torch.empty_like(scores)]
    yield Call(
        "router", "", "input_gradient", [index, scores, draw(*some, n.top_k), slopes], [w], gradients, about, [x.shape]
    )
    bucket = [empty(n.experts, n.hidden, like=torch.float32)]
    yield Call("router", "", "weight_gradient", [x, slopes], [w], bucket, about, [x.shape])


def reference_kernel(call: Call) -> TorchKernel:
    """The reference kernel, and for products one product per expert."""
    table = grouped_experts.EMULATED if call.op_name == "expert_linear" else reference.EXPERTS
    return table[call.op_name]


def kernels_to_test(call: Call, *, tiles: bool) -> Iterator[tuple[str, TorchKernel, OpDeclaration]]:
    """(name, kernel, declaration) of each kernel that is tested on a call."""
    if call.op_name == "expert_offsets":
        yield "reference", reference.EXPERTS[call.op_name], OPS[call.op_name].declaration
        return
    layouts = [Layout(elementwise="triton")]
    if call.op_name == "router":
        layouts.append(Layout())
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


def errors(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error in norm; 0 of none."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True)]
    return max([((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs], default=0.0)


def different(call: Call, got: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    """The share of indices that differ; of a router, whether its counts are those of its own indices."""
    pairs = [(a, b) for a, b in zip(got, expected, strict=True) if not a.is_floating_point()]
    if not pairs:
        return {}
    if call.op_name != "router":
        return {"indices that differ": max((a != b).double().mean().item() for a, b in pairs)}
    (index, same), (counts, _) = pairs
    own = [torch.bincount(i.flatten(), minlength=counts.shape[1]) for i in index.unbind(1)]  # by sequence
    exact = torch.equal(counts, torch.stack(own))
    return {"indices that differ": (index != same).double().mean().item(), "counts are exact": exact}


def workspace(run: Callable[[], Any]) -> int:
    """Bytes that are requested from the allocator at the peak of a call, in addition to those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call, by CUDA events."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(13)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks[3:])


def row(
    call: Call, name: str, one: TorchKernel, declared: OpDeclaration, expected: list[torch.Tensor]
) -> dict[str, Any]:
    """The row of one kernel on one call."""
    found: dict[str, Any] = {"op": f"{call.op_name} {call.what}".strip(), "phase": call.phase, "kernel": name}
    for out in call.outs:
        out.fill_(float("nan") if out.is_floating_point() else -1)
    first = [y.clone() for y in call.run(one)]
    found["error"] = errors(*([t for t in some if t.is_floating_point()] for some in (first, expected)))
    found |= different(call, first, expected)
    found["same again"] = all(torch.equal(a, b) for a, b in zip(first, call.run(one), strict=True))
    if call.phase == "weight_gradient":
        found["error added"] = errors([y / 2 for y in call.run(one, add=True)], expected)
    held = max(found["error"], found.get("error added", 0.0)) < TOLERANCE and found.get("counts are exact", True)
    few = FEW if call.op_name == "router" else 0.0
    found["held"] = held and found["same again"] and found.get("indices that differ", 0.0) <= few
    if DEVICE.type != "cuda":
        return found
    found["workspace - declared"] = workspace(lambda: call.run(one)) - declared.workspace(*call.shapes(), WIDTHS)
    found["ms"] = milliseconds(lambda: call.run(one))
    if call.phase == "weight_gradient":
        found["ms added"] = milliseconds(lambda: call.run(one, add=True))
    phase, *shapes = call.shapes()
    registers = [sum(t.nbytes for t in tensors) for tensors in (call.ins, call.weights, call.outs)]
    took = declared.cost(RATES, CallShapes(phase, *shapes), WIDTHS, lambda: registers)
    found["planned ms"] = took[1] * 1e3
    if flops := declared.flops(*call.shapes()):
        found["TFLOP/s"] = flops / found["ms"] / 1e9
    elif kernels := declared.traffic(*call.shapes(), WIDTHS):
        found["GB/s"] = sum(k.times * k.moved for k in kernels) / found["ms"] / 1e6
    return found


def zeros_by_torch(n: Sizes) -> dict[str, Any]:
    """Whether torch's grouped product writes zeros for experts without rows. If so, they need not be cleared."""
    a = torch.randn(n.hidden, 512, device=DEVICE).bfloat16()
    b = torch.randn(512, n.ffn, device=DEVICE).bfloat16()
    junk = [torch.full((4, n.hidden, n.ffn), float("nan"), device=DEVICE).bfloat16() for _ in range(3)]
    del junk  # so that the memory that the allocator returns next is not zero
    offsets = torch.tensor([0, 256, 256, 512, 512], dtype=torch.int32, device=DEVICE)
    product = grouped_experts.by_torch(a, b, offsets)
    return {"op": "torch._grouped_mm", "zeros for experts without rows": not product[[1, 3]].any().item(), "held": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the folder of the record")
    parser.add_argument("--only", default="", help="ops to test")
    parser.add_argument("--tiles", action="store_true", help="also test quack's products with other tiles")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    args = parser.parse_args()
    n = Sizes(tokens=48, experts=6, top_k=2, hidden=32, ffn=16) if args.tiny else Sizes()
    folder, rows = Path(args.out), list[dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)

    def note(found: dict[str, Any]) -> None:
        rows.append(found)
        print(json.dumps(found), flush=True)
        (folder / "expert_kernels.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")

    note(zeros_by_torch(n))
    for call in calls(n):
        if args.only and call.op_name not in args.only.split(","):
            continue
        expected = call.run(reference_kernel(call), wide=True)
        for name, one, declared in kernels_to_test(call, tiles=args.tiles):
            try:
                note(row(call, name, one, declared, expected))
            except Exception:  # the package may refuse a tile, or have too little memory for it
                note({"op": call.op_name, "phase": call.phase, "kernel": name, "held": False,
                      "failed": traceback.format_exc()[-600:]})  # fmt: skip
    print(f"held: {sum(r['held'] for r in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
