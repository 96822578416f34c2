"""Twelve layouts that were trained on four H200s, as the CSV of a sweep: what the pictures of the Bench view show.

Steps and memory are those of benchmarks/results/planned_steps_4xh200.json; predicted steps, of today's plan, those of
planned_times.json.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from statistics import median, quantiles

from penteract.planner.ask import parse_settings
from penteract.units import GIB

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
LAYOUT = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0, "micro_batch_size": 1, "schedule": "1f1b", "recompute": "none"}


def recorded_csv() -> str:
    """The table, as `penteract bench show --csv` writes one."""
    name = "planned_steps_4xh200"
    record = json.loads((RESULTS / f"{name}.json").read_text())
    today = json.loads((RESULTS / "planned_times.json").read_text())["groups"][name]["rows"]
    planned = {row["row"]: row["planned_ms"] / 1000 for row in today}
    gpus = int(record["gpus"].split("x")[0])
    tokens = record["sequence_length"] * int(record["batch"].removesuffix("seqs"))
    rows = list[dict[str, object]]()
    for row in record["rows"]:
        text, steps = row["layout"], [ms / 1000 for ms in row["step_ms"]]
        layout = {name: values[0] for name, values in parse_settings(text, flag="--layout", several=False).items()}
        layout = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in layout.items()}
        step, deciles = median(steps), quantiles(steps, n=10, method="inclusive")
        rows.append({
            "case": text, "state": "done", "model": record["model"], "ranks": gpus,
            **LAYOUT, **{name: value for name, value in layout.items() if name in LAYOUT}, "layout": text,
            "attention": row["attention"], "sequence_length": record["sequence_length"],
            "predicted_step_s": planned[text], "predicted_tokens_per_s_per_gpu": tokens / planned[text] / gpus,
            "predicted_allocated_bytes": round(GIB * max(row["predicted"]["allocated_gib"])),
            "step_s": step, "spread": (deciles[-1] - deciles[0]) / step, "tokens_per_s_per_gpu": tokens / step / gpus,
            "allocated_bytes": round(GIB * max(row["measured"]["allocated_gib"])),
            "device_bytes": round(GIB * max(row["measured"]["device_gib"])), "device": record["device"],
            "commit": record["commit"],
        })  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
