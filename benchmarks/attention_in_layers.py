"""One GPU: rates of fused attention between the products of its layer.

    python benchmarks/attention_in_layers.py --date 2026-11-27 > benchmarks/results/attention_in_layers_h200.json

As `penteract calibrate` does. Products draw more power than attention does, and power limits the clock: behind large products
alone, attention is slower than in a step that it takes most of. The FLOPs are those of the causal half. The record has
microseconds of forward and backward by kernel, medians over calls: in a layer, and behind 20 ms of large products.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from penteract.measure.calibrate.attention_workloads import SHAPES, attention
from penteract.measure.calibrate.hot_clock import HotClock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="for the record")
    parser.add_argument("--commit", default="")
    parser.add_argument("--kernels", default="cudnn,fa4")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    clock, found = HotClock(device), dict[str, dict[tuple[str | int, ...], list[float]]]()
    for (_, kernel, way, *shape), make, around in attention(device):
        if kernel in args.kernels.split(","):
            op = make()
            us = [clock.microseconds_in_layer(op, around), clock.microseconds(op)]
            found.setdefault(str(kernel), {}).setdefault(tuple(shape), []).extend(us)
            print(kernel, way, shape, us, file=sys.stderr, flush=True)
            del op
            torch.cuda.empty_cache()
    rows = {name: [[*s, *by_shape[s][::2]] for s in SHAPES if s in by_shape] for name, by_shape in found.items()}
    behind = {name: [[*s, *by_shape[s][1::2]] for s in SHAPES if s in by_shape] for name, by_shape in found.items()}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
             "flash-attn-4": version("flash-attn-4"), "cudnn": torch.backends.cudnn.version(), "date": args.date,
             "commit": args.commit, "row": "batch, heads, KV heads, sequence, head size, width, us forward, us backward"}  # fmt: skip
    print(json.dumps(about | {"in_layer": rows, "behind_products": behind}))


if __name__ == "__main__":
    main()
