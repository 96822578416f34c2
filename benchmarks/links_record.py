"""Collectives that `penteract calibrate` measured, beside the curves of the catalogue's node, and what plans with its file
say of a measured sweep.

python benchmarks/links_record.py 2xh200.toml benchmarks/results/bench_two_cards_h200.json --commit HASH > RECORD.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance

from penteract.config.hardware import Cluster, cluster, reference
from penteract.config.resolve.resolved_run import resolve
from penteract.readings.costs.curve import Curve
from penteract.readings.estimator import Estimator


def errors(sweep: dict[str, Any], node: Cluster) -> list[float]:
    """Of the step times that plans on a node say for the rows of a sweep's record: predicted over measured, less 1."""
    found = list[float]()
    for row in sweep["rows"]:
        run = resolve(None, sweep["preset"], [*row["settings"]], node.gpus).run
        prices = Estimator(run.model, node, run.sequence_length, run.precision.policy)
        found.append(round(1e3 * prices.time(prices.estimate(run.layout)).seconds / row["median_ms"] - 1, 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    node, sweep = cluster(str(asked.file)), json.loads(asked.sweep.read_text())
    curves = node.curves
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
        "copies_gb_s": {key: rate for key, rate in curves.memory if key.startswith(("h2d", "d2h"))},
        "contention": dict(curves.contention), "slowed": dict(curves.slowed), "sweep": asked.sweep.name,
        "step_time_errors": errors(sweep, node), "step_time_errors_of_the_catalogue": errors(sweep, cluster(sweep["gpus"])),
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
