"""A record of the first layouts of a plan, as `penteract bench --top` measured them.

    python benchmarks/plan_record.py FOLDER … --commits COMMIT … > benchmarks/results/bench_plan_8b_4xh200.json

Each folder is a sweep of one question, such as with and without kernels of packages. A row has the settings of its run,
so that it can be planned again; it says which sweep it is of, and its place in that plan. `regret`: by how much the plan's
first was slower than the fastest. A time is the median of the timed steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance

from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import toml_value
from penteract.config.rules.case import KEYS
from penteract.measure.schemas.sweep import SweepRow
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.units import gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--commits", nargs="+", type=hexadecimal, required=True, help="one of each folder")
    asked = parser.parse_args()
    sweeps, rows, about = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, Any]()
    for number, (folder, commit) in enumerate(zip(asked.folders, asked.commits, strict=True)):
        sweep = SweepFolder(folder).read()
        measured = [row_of(row, folder, commit) | {"sweep": number} for row in sweep.rows if row.result is not None]
        about |= about_of(sweep.rows)
        fastest = min(row["median_ms"] for row in measured)
        command = sweep.settings.command.partition(" --out")[0]
        (first,) = [row["median_ms"] for row in measured if row["place"] == 1]
        sweeps.append({"command": command, "commit": commit, "regret": first / fastest - 1})
        rows += measured
    record = {
        **provenance("python benchmarks/plan_record.py", asked.commits[0]), **about, "timed_by": "device",
        "sweeps": sweeps, "rows": rows,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


def about_of(rows: tuple[SweepRow, ...]) -> dict[str, Any]:
    """What is common to all rows."""
    first = next(row for row in rows if row.result is not None)
    assert first.result is not None
    source = first.result.provenance
    gpus = f"{first.case.ranks}x{source.device.removeprefix('NVIDIA ')}"
    return {"device": source.device, "versions": source.versions, "date": source.began[:10], "preset": first.case.model,
            "gpus": gpus}  # fmt: skip


def row_of(row: SweepRow, folder: Path, commit: str) -> dict[str, Any]:
    """One layout: what was planned, and what was measured."""
    case, result = row.case, row.result
    assert result is not None and not result.measured.void, case.name
    found, steps = result.measured, [1e3 * s for s in result.measured.steps_s]
    ran = resolve(folder / "cases" / case.name / "run.toml", None, [], case.ranks).run
    settings = [
        f"batch.sequence_length={case.sequence_length}", f"batch.global_batch_size={case.global_batch_size}",
        f'precision.dtype="{case.precision}"', "data.pack_documents=false",
        *(f"{KEYS[name]}={toml_value(getattr(ran.layout, name))}" for name in case.layout),
    ]  # fmt: skip
    assert resolve(None, case.model, settings, case.ranks).run.layout == ran.layout, case.name
    sizes = {f"{name}_gib": gib(max(getattr(found, f"{name}_bytes"))) for name in ("allocated", "reserved", "device")}
    routed = {}
    if found.routed_rows:
        rows = list(found.routed_rows[found.fullest])
        routed = {"imbalance": found.imbalance, "routed": {"rank": found.fullest, "rows": rows}}
    return {
        "name": case.name, "place": case.number, "commit": commit, "settings": settings, "layout": case.layout_text,
        "median_ms": median(steps), "spread_ms": [min(steps), max(steps)],
        "planned_ms": 1e3 * (case.predicted.step_s or 0), "losses": [found.losses[0], found.losses[-1]],
        "tok_s_gpu": found.tokens_per_s_per_gpu, "planned_gib": gib(case.predicted.allocated_bytes), **sizes, **routed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
