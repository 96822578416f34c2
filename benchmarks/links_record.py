"""Collectives that `penteract calibrate` measured, beside the curves of the catalogue's node.

python benchmarks/links_record.py 2xh200.toml --commit HASH > benchmarks/results/links_2xh200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance

from penteract.config.hardware import cluster, reference
from penteract.readings.costs.curve import Curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    curves = cluster(str(asked.file)).curves
    assert curves is not None
    catalogue = {(kind, ranks): Curve.of(points) for kind, ranks, points in reference().collectives}
    rows = [
        {"collective": kind, "ranks": ranks, "bytes": size, "us": us, "catalogue_us": round(catalogue[kind, ranks](size), 1)}
        for kind, ranks, points in curves.collectives for size, us in points
    ]  # fmt: skip
    about = dict(curves.provenance)
    record: dict[str, Any] = {
        "case": "links by penteract calibrate", **provenance("python benchmarks/links_record.py", asked.commit),
        "device": about["device"], "torch": about["torch"], "nccl": about["nccl"], "spread": about["link_spread"],
        "copies_gb_s": {key: rate for key, rate in curves.memory if key.startswith(("h2d", "d2h"))}, "rows": rows,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
