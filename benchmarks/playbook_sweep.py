"""The planner's order of the layouts that the Ultra-Scale Playbook measured on 8 to 128 H100s.

    python benchmarks/playbook_sweep.py playbook_sweep_h100.csv > benchmarks/results/playbook_sweep.json

For each model and number of nodes: the rank correlation of predicted and measured tokens/s/GPU over all layouts that ran,
the rank of the fastest measured layout in our order, and how much slower than it our first choice was measured. Nothing is
fitted to these rows. Pointwise ops are planned as one kernel each, as in the trainer that was measured. Memory is predicted
for this program, not for that trainer.

The argument is the table of the runs, with the columns that `layout_of` and `group` read. The record has its name and its
digest. Only runs that completed, with 256 sequences of 4096 tokens a step, are used. It takes 15 seconds.
"""

from __future__ import annotations

import csv
import hashlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.measure.report.one_kernel_ops import fused, with_other_host
from penteract.measure.report.published_sets import PLAYBOOK_LENGTH as LENGTH
from penteract.measure.report.published_sets import PLAYBOOK_MODELS as MODELS
from penteract.measure.report.published_sets import playbook_layout as layout_of
from penteract.planner.ask import as_text
from penteract.readings.estimator import Estimator
from penteract.units import gib


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1 for the smallest. Equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out = [0.0] * len(values)
    at = 0
    while at < len(order):
        same = [i for i in order[at:] if values[i] == values[order[at]]]
        for i in same:
            out[i] = at + (len(same) + 1) / 2
        at += len(same)
    return out


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    return statistics.correlation(ranks(a), ranks(b))


def group(name: str, nodes: int, rows: list[dict[str, str]]) -> dict[str, Any]:
    """The record of one model on one number of nodes."""
    estimator = Estimator(
        MODELS[name], with_other_host(cluster(f"{nodes}x8xH100", fabric="efa")), sequence_length=LENGTH
    )
    measured, predicted, memory = list[float](), list[float](), list[float]()
    for row in rows:
        layout = layout_of(row)
        with fused():
            estimate = estimator.estimate(layout)
            seconds = estimator.time(estimate).seconds
        measured.append(float(row["tokens_per_s_per_gpu"]))
        predicted.append(layout.global_batch_size * LENGTH / seconds / layout.world)
        memory.append(gib(estimate.allocated) / (float(row["gpu_memory_GB"]) or float("nan")))
    best = max(range(len(rows)), key=measured.__getitem__)
    first = max(range(len(rows)), key=predicted.__getitem__)
    return {
        "model": MODELS[name].name, "nodes": nodes, "layouts": len(rows),
        "spearman": round(spearman(measured, predicted), 3),
        "measured_best_is_our_number": 1 + sum(p > predicted[best] for p in predicted),
        "our_first_was_slower_by": round(1 - measured[first] / measured[best], 3),
        "median_predicted_over_measured": round(statistics.median(p / m for p, m in zip(predicted, measured, strict=True)), 2),
        "median_memory_over_measured": round(statistics.median(memory), 2),
        "best": shown(rows[best], predicted[best]), "our_first": shown(rows[first], predicted[first]),
    }  # fmt: skip


def shown(row: dict[str, str], predicted: float) -> dict[str, Any]:
    """A row: its layout, and tokens/s/GPU."""
    lay, measured = layout_of(row), float(row["tokens_per_s_per_gpu"])
    layout = {"layout": as_text(lay, Layout()), "gradient_accumulation_steps": lay.gradient_accumulation_steps}
    return layout | {"measured": round(measured), "predicted": round(predicted)}


def main(path: Path) -> None:
    """Print the record."""
    groups = defaultdict[tuple[str, int], list[dict[str, str]]](list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "completed" and row["gbs_sequences"] == "256":
                groups[row["model_params_B"], int(row["nodes"])].append(row)
    records = [group(name, nodes, rows) for (name, nodes), rows in sorted(groups.items()) if len(rows) > 2]
    record = {
        **provenance(f"python benchmarks/playbook_sweep.py {path.name}"),
        "data_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "median_spearman": round(statistics.median(g["spearman"] for g in records), 3), "groups": records,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
