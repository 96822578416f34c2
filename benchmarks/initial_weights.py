"""One GPU: the initial weights of one rank of an 8B model: seconds, and whether a CPU draws the same bits.

    python benchmarks/initial_weights.py --out FOLDER [--commit HASH] [--layers 12] [--at-once 262144,1048576,4194304]

The model has all its widths and so many of its layers that state in bf16 with fp32 master weights fits. It is drawn
`TIMES` times by torch and by a kernel in Triton (`elementwise`), for each number of elements that are drawn at once;
`temporaries` are the bytes allocated beside the state. The first time of a kernel has its compilation.
`seconds_8b` is what all layers would take at the same speed. Then small models with every kind of parameter are drawn on the
device and on the CPU: `equal` says whether all bits are. Writes FOLDER/initial_weights.json. `--device cpu --model tiny` tries it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from provenance import hexadecimal, provenance

from penteract.config.catalog import model as find_model
from penteract.config.layout import Elementwise, Layout
from penteract.config.model import ModelSpec
from penteract.config.resolve.presets import TINY, TINY_LATENT, TINY_MOE
from penteract.engine.device.device import device_of
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.state.state import allocate
from penteract.step.program import Program, compile_step

TIMES = 3
SMALL = [replace(TINY, tied=True), TINY_MOE, TINY_LATENT]
RANKS = [(Layout(), 0), (Layout(tp=2), 1), (Layout(dp=2, tp=2, zero=3), 3), (Layout(dp=2), 1)]
RECIPES = ["fp32", "bf16", "bf16_pure", "fp16"]
KINDS: tuple[Elementwise, ...] = ("reference", "triton")


def equal(m: ModelSpec, layout: Layout, rank: int, recipe: str, device: torch.device) -> bool:
    """Whether parameters and master weights of a rank have the same bits on the device and on the CPU."""
    p = compile_step(m, layout, 32, precision=recipe, rank=rank)
    here, cpu = (allocate(p, at) for at in (device, torch.device("cpu")))
    for state in (here, cpu):
        initialise(p, state, 7)
    flats = zip(here.flats, cpu.flats, strict=True)
    pairs = [(x, y) for a, b in flats for x, y in ((a.own_parameter, b.own_parameter), (a.master, b.master))]
    return all(torch.equal(x.cpu().view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def timed(p: Program, device: torch.device, at_once: int) -> dict[str, Any]:
    """Seconds of each drawing, and the peak of its temporaries."""
    state = allocate(p, device)
    on, took = device_of(device), list[float]()
    usual, type(on).at_once = on.at_once, at_once
    for _ in range(TIMES):
        on.settle()
        begun = time.perf_counter()
        initialise(p, state, 7)
        on.settle()
        took.append(time.perf_counter() - begun)
    before = torch.cuda.memory_allocated()
    _, peak = on.peak(lambda: initialise(p, state, 7), lambda: ())
    type(on).at_once = usual
    elements = sum(q.numel(p.mesh) for q in p.params)
    written = sum(f.own_parameter.nbytes + f.master.nbytes for f in state.flats)
    return {"elementwise": p.layout.elementwise, "at_once": at_once, "usual": at_once == usual, "seconds": took, "elements": elements,
            "temporaries": peak - before, "gb_a_second": written / min(took) / 1e9}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--at-once", default=",".join(str(2**n) for n in range(18, 25, 2)))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    whole = TINY if args.model == "tiny" else find_model(args.model)
    part, rows = replace(whole, layers=min(args.layers, whole.layers)), list[dict[str, Any]]()
    for elementwise in KINDS:
        p = compile_step(part, Layout(elementwise=elementwise), 4096, precision="bf16")
        for n in args.at_once.split(","):
            row = timed(p, device, int(n))
            row["seconds_8b"] = min(row["seconds"]) * 8.03e9 / row["elements"]
            rows.append(row)
            print(row, flush=True)
    same = {f"{m.name} {recipe} {layout.tp}·{layout.dp}·{layout.zero} {kind}":
            equal(m, replace(layout, elementwise=kind), rank, recipe, device)
            for m in SMALL for layout, rank in RANKS for recipe in RECIPES for kind in KINDS}  # fmt: skip
    record = {**provenance("benchmarks/initial_weights.py", args.commit), "device": device_of(device).name, "torch": torch.__version__,
              "model": args.model, "layers": args.layers, "rows": rows, "equal": same}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "initial_weights.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{sum(same.values())} of {len(same)} are equal to the last bit")
    assert all(same.values()), same


if __name__ == "__main__":
    main()
