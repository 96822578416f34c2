"""Memory and bubbles that the Ultra-Scale Playbook draws, beside ours for the same models and layouts.

    python benchmarks/playbook_figures.py ../shared/data > benchmarks/results/playbook_figures.json

The book's figures are read where they lie (`playbook_*.csv`); the record keeps ratios of ours to theirs alone: the least,
the median and the largest of a figure's cells. Theirs has 2 bytes of gradients a parameter, 8 of an optimizer without
master weights, activations of 34 s b h a layer with attention's scores kept out, and no head. Ours are of the recorded
program in bf16.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import provenance

from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.readings.estimator import Estimator
from penteract.schedule.check import check
from penteract.schedule.in_flight import action_lists
from penteract.schedule.registry import breach, schedule_of
from penteract.units import GIB

MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b"}
KINDS = {"Model Parameters": "parameters", "Gradients": "gradients", "Optimizer States": "optimizer",
         "Activations": "activations"}  # fmt: skip
ALONE = {"No Parallelism": {}, "No Parallelism (TP-1)": {}}
FIGURES: dict[str, dict[str, dict[str, Any]]] = {
    "zero_memoryusage_8b": {
        "DP=8": {"dp": 8}, **{f"DP=8 Zero-{stage}": {"dp": 8, "zero": stage} for stage in (1, 2, 3)},
    },
    "tp_memoryusage_70b": {**ALONE, "TP=8": {"tp": 8}, "TP=16": {"tp": 16}},
    "tp_sp_memoryusage_70b": {**ALONE, "TP=8 (with SP)": {"tp": 8}, "TP=16 (with SP)": {"tp": 16}},
    "cp_memoryusage_8b": {**ALONE, "TP=2 CP=1": {"tp": 2}, "TP=2 CP=4": {"tp": 2, "cp": 4}},
    "pp_memoryusage_8b": {**ALONE, "PP=8": {"pp": 8, "gradient_accumulation_steps": 8}},
}  # fmt: skip


def ours(name: str, length: int, changes: dict[str, Any]) -> dict[str, float]:
    """GiB by kind, of the fullest rank."""
    layout = Layout(micro_batch_size=1, attention="cudnn", loss="chunked", elementwise="triton", **changes)
    gpus = f"{(layout.world + 7) // 8}x8xH200" if layout.world > 8 else f"{layout.world}xH200"
    estimate = Estimator(model(MODELS[name]), cluster(gpus), length).estimate(layout)
    return {kind: size / GIB for kind, size in estimate.memory.items()}


def figure(rows: list[dict[str, str]], layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By layout and kind: [cells, least, median, largest ratio of ours to theirs]."""
    ratios = defaultdict[str, list[float]](list)
    for row in rows:
        theirs = float(row["memory_GiB"])
        kind = KINDS[row["component"]]
        found = ours(row["model"], int(row["seq_len"]), layouts[row["panel"]])[kind]
        ratios[f"{row['panel']}: {kind}"].append(found / theirs)
    return {name: [len(all_), min(all_), median(all_), max(all_)] for name, all_ in ratios.items()}


def bubbles(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Idle over ideal time, by the schedule that runs: (p-1)/(v m) in the book. Where it is no schedule of ours: why."""
    differences, refused = list[float](), 0
    for row in rows:
        p, m, v = int(row["p"]), int(row["m_microbatches"]), int(row["v_chunks"])
        name: Any = "1f1b" if v == 1 else "interleaved"
        if breach(name, p, v, m) is not None:
            refused += 1
            continue
        report = check(action_lists(name, p, v, m), schedule_of(name).placement(p, v), m)
        differences.append(report.bubble / (1 - report.bubble) - float(row["bubble_ratio"]))
    return {
        "compared": len(differences),
        "no schedule of ours": refused,
        "largest difference": max(map(abs, differences)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder of the book's figures")
    data: Path = parser.parse_args().data

    def read(name: str) -> list[dict[str, str]]:
        with (data / f"playbook_{name}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    record = {
        **provenance("python benchmarks/playbook_figures.py ../shared/data"),
        "memory": {name: figure(read(name), layouts) for name, layouts in FIGURES.items()},
        "bubbles": bubbles(read("pp_bubblesize")),
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
