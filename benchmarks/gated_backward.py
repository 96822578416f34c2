"""One GPU: ways to go backward through SwiGLU's three products in bf16: correctness and speed.

    python benchmarks/gated_backward.py --out FOLDER [--commit HASH] [--rows 16384] [--shapes 4096x14336,2048x8192]
        [--tiles 128x128p,128x192p,128x256,256x128,256x192] [--clusters 2x1,1x2] [--rounds 12]
        [--stages slopes,input,weight,forward,again] [--ways cublas,in_turn,in_turn_post,beside]

Writes FOLDER/gated_backward.json. A shape is the width of the network and that of SwiGLU. Stages: `slopes`, the gradient
of down's result to those of gate and up; `input`, on to the gradient of what gate and up read; `weight`, the fp32
gradient of their weights, added; `forward`, their product; `again`: `slopes`, and SwiGLU's result made again. Ways:
`cublas` is cuBLAS's product, for `slopes` with the engine's pass after it; of quack's, `in_turn` has gate and up of a
feature next to each other, `beside` (the engine's) side by side, `in_turn_post` and `stored` make SwiGLU's result again
as they store, and `pass` is `beside` and a pass of the engine's for it. Check (`held`): some rows against fp32.

Each way of a stage runs at every tile (`p`: two take turns) and cluster; the fastest of each then runs beside the others
in `--rounds` rounds of `IN_A_ROW` launches, every second round from the last to the first: `ms` is the median, `spread`
the range over it. `sums` adds a path's stages. With `--device cpu --rows 64 --shapes 32x48` plain torch stands in for
quack.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from gated_products import Config, Plain, Quack, in_turn, slopes_of, swiglu
from measuring import form_options, measured_on, seconds

from penteract.engine.kernels.triton.swiglu import put_swiglu, put_swiglu_input

Run = Callable[[], Any]
Ways = Mapping[str, Callable[[Any], Run]]  # by name: what runs at a configuration of quack's; None of torch's

CHECKED, IN_A_ROW, TRIES, HELD = 256, 4, 3, 2.0**-7
PATHS = {  # by name: a way of each stage
    "cublas": {"slopes": "cublas", "input": "cublas", "weight": "cublas", "forward": "in_turn"},
    "in_turn": {"slopes": "in_turn", "input": "in_turn", "weight": "in_turn", "forward": "in_turn"},
    "in_turn_post": {"slopes": "in_turn_post", "input": "in_turn", "weight": "in_turn", "forward": "in_turn"},
    "beside": {"slopes": "beside", "input": "cublas", "weight": "cublas", "forward": "beside"},
    "beside_quack": {"slopes": "beside", "input": "beside", "weight": "beside", "forward": "beside"},
}


# ---- the ways of each stage ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What all ways of a shape read and write. T rows, D and F the widths: x, dy [T, D]; w [2·F, D], gate before up;
    down [D, F]."""

    x: torch.Tensor
    dy: torch.Tensor
    w: torch.Tensor
    down: torch.Tensor
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def new(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A result by name, that ways share: random at first, so that what stays unwritten shows."""
        if name not in self.made:
            self.made[name] = torch.randn(shape, device=self.x.device).to(dtype)
        return self.made[name]


def drawn(rows: int, width: int, wide: int, device: torch.device) -> Case:
    """Random, of the sizes that training has at its start."""
    normal = partial(torch.randn, device=device)
    x, dy = normal(rows, width), normal(rows, width)
    w, down = normal(2 * wide, width) * width**-0.5, normal(width, wide) * wide**-0.5
    case = Case(*(t.to(torch.bfloat16) for t in (x, dy, w, down)))
    both = torch.mm(case.x, case.w.t())
    case.made.update(both=both, packed=in_turn(both, 1))
    slopes = torch.cat(slopes_of(*both.chunk(2, 1), torch.mm(case.dy, case.down)), 1)  # type: ignore[arg-type]
    case.made.update(slopes=slopes, slopes_packed=in_turn(slopes, 1))
    return case


def ways_of(stage: str, case: Case, library: Quack | Plain) -> Ways:
    """The ways of a stage, by name."""
    (rows, width), wide = case.x.shape, case.down.shape[1]
    both, packed, slopes, slopes_packed = (case.made[k] for k in ("both", "packed", "slopes", "slopes_packed"))
    half = case.new("half", rows, wide)
    into_packed, into = case.new("into_packed", rows, 2 * wide), case.new("into", rows, 2 * wide)
    dx, gradient = case.new("dx", rows, width), case.new("gradient", 2 * wide, width, dtype=torch.float32)

    def today(_: Any) -> Run:
        def run() -> None:
            torch.mm(case.dy, case.down, out=half)
            put_swiglu_input(gate, up, half, of_gate, of_up)

        return run

    def by_pass(c: Any) -> Run:
        product = library.epilogue

        def run() -> None:
            product("slopes_beside", *d, gate, {"D": of_gate, "of_up": of_up}, c, up=up)
            put_swiglu(gate, up, half)

        return run

    def added() -> None:
        if gradient.is_cuda:
            torch.ops.aten.addmm.dtype_out(gradient, slopes.t(), case.x, torch.float32, out=gradient)
        else:
            gradient.add_(slopes.t().float() @ case.x.float())

    epilogue, product = partial(partial, library.epilogue), partial(partial, library.product)
    (gate, up), (of_gate, of_up) = both.chunk(2, 1), into.chunk(2, 1)
    d, w = (case.dy, case.down), (case.x, case.w.t())
    stages: dict[str, Ways] = {
        "slopes": {
            "cublas": today,
            "in_turn": lambda c: epilogue("slopes_in_turn", *d, packed, {"D": into_packed}, c),
            "in_turn_post": lambda c: epilogue("dgated", *d, packed, {"D": into_packed, "mAuxOut": half}, c),
            "beside": lambda c: epilogue("slopes_beside", *d, gate, {"D": of_gate, "of_up": of_up}, c, up=up),
        },
        "input": {
            "cublas": lambda _: partial(torch.mm, slopes, case.w, out=dx),
            "in_turn": lambda c: product(slopes_packed, case.w, dx, False, ("B",), c),
            "beside": lambda c: product(slopes, case.w, dx, False, (), c),
        },
        "weight": {
            "cublas": lambda _: added,
            "in_turn": lambda c: product(slopes_packed.t(), case.x, gradient, True, ("out",), c),
            "beside": lambda c: product(slopes.t(), case.x, gradient, True, (), c),
        },
        "forward": {
            "in_turn": lambda c: epilogue("gated", *w, None, {"D": into_packed, "mAuxOut": half}, c, concat_layout=("B",)),
            "beside": lambda c: epilogue(
                "swiglu_beside", *w, None, {"gate": of_gate, "up": of_up, "out": half}, c, concat_layout=("B",)
            ),
        },
        "again": {
            "beside": lambda c: epilogue("slopes_beside", *d, gate, {"D": of_gate, "of_up": of_up}, c, up=up),
            "pass": by_pass,
            "stored": lambda c: epilogue(
                "slopes_again", *d, gate, {"D": of_gate, "of_up": of_up, "again": half}, c, up=up
            ),
        },
    }  # fmt: skip
    return stages[stage]


def off(stage: str, way: str, case: Case, run: Run) -> float:
    """The largest error of what a way writes, by the norm of what fp32 makes of some rows."""
    n, made = CHECKED, case.made
    results = [made[k] for k in ("half", "into", "into_packed", "dx", "gradient")]
    for t in results:
        t.normal_()
    before = made["gradient"].clone()
    run()
    gate, up = (t[:n].float() for t in made["both"].chunk(2, 1))
    some, full = slice(None, None, max(1, len(before) // n)), torch.Tensor.float
    if stage in ("slopes", "again"):
        want = torch.cat(slopes_of(gate, up, full(case.dy[:n]) @ full(case.down)), 1)
        pairs = [(made["into_packed"][:n], in_turn(want, 1)) if "turn" in way else (made["into"][:n], want)]
        pairs += [(made["half"][:n], swiglu(gate, up))] if way in ("in_turn_post", "pass", "stored") else []
    elif stage == "input":
        pairs = [(made["dx"][:n], full(made["slopes"][:n]) @ full(case.w))]
    elif stage == "weight":
        pairs = [(made["gradient"][some] - before[some], full(made["slopes"][:, some].t()) @ full(case.x))]
    else:
        both = full(case.x[:n]) @ full(case.w.t())
        stored = (made["into"][:n], both) if way == "beside" else (made["into_packed"][:n], in_turn(both, 1))
        pairs = [stored, (made["half"][:n], swiglu(*both.chunk(2, 1)))]
    return max(((got - want).norm() / want.norm()).item() for got, want in pairs)


# ---- measuring -------------------------------------------------------------------------------------------------------


def several(run: Run) -> None:
    """A few launches."""
    for _ in range(IN_A_ROW):
        run()


def timed(run: Run, device: torch.device) -> float:
    """Milliseconds of a launch among a few."""
    if device.type != "cuda":
        return 1e3 * seconds(run, device.type)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    several(run)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / IN_A_ROW


def tried(stage: str, way: str, make: Callable[[Any], Run], config: Config | None, case: Case) -> dict[str, Any]:
    """A way at a configuration: its error, and the shortest time of some; what failed, if it does."""
    found: dict[str, Any] = {"stage": stage, "way": way, "config": config}
    try:
        run = make(config)
        error = off(stage, way, case, run)
        ms = min(timed(run, case.x.device) for _ in range(TRIES))
        return {**found, "off": error, "held": error < HELD, "shortest_ms": ms}
    except Exception:
        return {**found, "failed": traceback.format_exc()[-1500:]}


def in_rounds(runs: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Each way's median and spread, timed in rounds that go forth and back."""
    times = {way: list[float]() for way in runs}
    for turn in range(rounds):
        for way in reversed(runs) if turn % 2 else runs:
            times[way].append(timed(runs[way], device))
    return {w: {"ms": median(t), "spread": (max(t) - min(t)) / median(t)} for w, t in times.items()}


def measured(
    shape: tuple[int, int, int],
    stages: list[str],
    named: list[str],
    configs: list[Config],
    rounds: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """The record of a shape, as it grows."""
    torch.manual_seed(0)
    case, library = drawn(*shape, device), Quack() if device.type == "cuda" else Plain()
    found: dict[str, Any] = dict(zip(("rows", "width", "wide"), shape, strict=True))
    found |= {"tried": [], "stages": {}, "sums": {}}
    for stage in stages:
        best = dict[str, tuple[float, Config | None]]()
        ways = {way: make for way, make in ways_of(stage, case, library).items() if way in named}
        for way, make in ways.items():
            for config in [None] if way == "cublas" else configs:
                row = tried(stage, way, make, config, case)
                print({k: v if k != "failed" else v[-300:] for k, v in row.items()}, flush=True)
                found["tried"].append(row)
                if row.get("held") and (way not in best or row["shortest_ms"] < best[way][0]):
                    best[way] = row["shortest_ms"], config
                yield found
        runs = {way: ways[way](config) for way, (_, config) in best.items()}
        times = in_rounds(runs, rounds, device)
        found["stages"][stage] = {way: {**t, "config": best[way][1]} for way, t in times.items()}
        print(stage, found["stages"][stage], flush=True)
        found["sums"] = sums(found["stages"])
        yield found


def sums(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of each path that has a way of every stage, without and with `forward`."""
    made = dict[str, float]()
    for path, of in PATHS.items():
        if all(of.get(stage) in ways for stage, ways in stages.items()):
            each = {stage: ways[of[stage]]["ms"] for stage, ways in stages.items()}
            made |= {
                path: sum(ms for stage, ms in each.items() if stage != "forward"),
                f"{path}_both_ways": sum(each.values()),
            }
    return made


def configs_of(tiles: str, clusters: str) -> list[Config]:
    """128x192p at 2x1: two tiles of 128 by 192 in turn, two such next to each other in a cluster."""
    every = list[Config]()
    for cluster in clusters.split(","):
        high, wide = map(int, cluster.split("x"))
        for tile in tiles.split(","):
            rows, columns = map(int, tile.removesuffix("p").split("x"))
            every.append((rows, columns, tile.endswith("p"), high, wide))
    return every


def main() -> None:
    parser = form_options("Ways to go backward through SwiGLU's products.")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--shapes", default="4096x14336,2048x8192")
    parser.add_argument("--tiles", default="128x128p,128x192p,128x256,256x128,256x192")
    parser.add_argument("--clusters", default="2x1,1x2")
    parser.add_argument("--stages", default="slopes,input,weight,forward")
    parser.add_argument("--ways", default="cublas,in_turn,in_turn_post,beside")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    device, configs = torch.device(args.device), configs_of(args.tiles, args.clusters)
    shapes = [(args.rows, *map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    found: dict[str, Any] = {**measured_on(args), "shapes": [None] * len(shapes)}
    for at, (rows, width, wide) in enumerate(shapes):
        what = args.stages.split(","), args.ways.split(",")
        for record in measured((rows, width, wide), *what, configs, args.rounds, device):
            found["shapes"][at] = record
            (args.out / "gated_backward.json").write_text(json.dumps(found, indent=1))
        print(found["shapes"][at]["sums"], flush=True)


if __name__ == "__main__":
    main()
