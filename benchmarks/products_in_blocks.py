"""One GPU: hot products of FP8 values with a scale for each block, and with one for each tensor.

    python benchmarks/products_in_blocks.py > benchmarks/results/products_in_blocks_h200.json

Shapes and clock are those of `penteract calibrate`. A row: times, m, n, k and microseconds of a product [m, k]·[k, n].
Blocks of a weight are squares; `gradient`: both operands have blocks of one row, as in a weight gradient.
`penteract calibrate` measures all kinds, too; `benchmarks/make_8xh200.py` takes those in blocks of this record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from provenance import hexadecimal, provenance

from penteract.config.files.hardware_schema import BLOCK_SUMS, BLOCKS
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.workloads import products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    device = torch.device("cuda")
    clock, found = HotClock(device), dict[str, list[list[float]]]()
    with torch.no_grad():
        for kind in (BLOCKS, BLOCK_SUMS, "fp8"):
            found[kind] = [[*map(int, w.key[2:]), w.microseconds(clock)] for w in products(device, kind)]
    about = provenance("python benchmarks/products_in_blocks.py", asked.commit)
    record = {"case": "hot products of FP8 values", **about, "device": torch.cuda.get_device_name(),
              "torch": torch.__version__, "products": found}  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
