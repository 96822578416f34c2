"""A record of sweeps that `penteract bench` measured.

    python benchmarks/sweep_record.py benchmarks/sweeps/one_card.toml FOLDER … > benchmarks/results/bench_one_card_h200.json

The folders hold cases of one sweep's file, which may have been measured in parts. A row has the settings of its run, so
that it can be planned again, with padded rows of experts where these were chosen for the GPU. Cases that were not
measured are named. A time is the median of the timed steps. `--add RECORD`: its rows come first, of a sweep that goes on;
each keeps the commit that it was measured at. Of a case that is in several folders the first counts.
`--by-host`: the folders are of before steps were timed by the device's clock. A host that runs ahead of its GPU sees the
end of the last step too soon after that of the one before, so the last is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance

from penteract.config.resolve.write_run_file import toml_value
from penteract.measure.bench.cases.sweep_file import read_sweep
from penteract.measure.schemas.sweep import CaseMeasurement
from penteract.measure.schemas.sweep_folder import SweepFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--by-host", action="store_true")
    parser.add_argument("--add", type=Path)
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    question, rows = read_sweep(asked.file), list[dict[str, Any]]()
    wanted = [dict(case.values) for case in question.cases]
    words = [*question.words, "data.pack_documents=false"]
    about: dict[str, Any] = {}
    if asked.add is not None:
        before = json.loads(asked.add.read_text())
        rows = [{"commit": before["commit"], **row} for row in before["rows"]]
        wanted = before["not_measured"]
    for folder in asked.folders:
        for row in SweepFolder(folder).read().rows:
            values = next((case for case in wanted if as_named(case) == dict(row.case.varied)), None)
            if row.result is None or row.result.measured.void or values is None:
                continue
            measured, source = row.result.measured, row.result.provenance
            wanted.remove(values)
            about = {"device": source.device, "versions": source.versions, "date": source.began[:10]}
            steps = [1e3 * s for s in measured.steps_s][: -1 if asked.by_host else None]
            padded = "expert_rows=padded" in row.case.layout_text and "parallel.expert_rows" not in values
            chosen = ['parallel.expert_rows="padded"'] * (padded and not any("expert_rows" in word for word in words))
            most = {
                name: max(getattr(measured, f"{name}_bytes")) / 2**30 for name in ("allocated", "reserved", "device")
            }
            number = [dict(case.values) for case in question.cases].index(values) + 1
            rows.append({
                "name": f"{number:03d}_{row.case.name.partition('_')[2]}", "commit": asked.commit or source.commit, "settings": [*words, *(f"{k}={toml_value(v)}" for k, v in values.items()), *chosen],
                "layout": row.case.layout_text, "median_ms": median(steps), "spread_ms": [min(steps), max(steps)],
                "planned_ms": 1e3 * (row.case.predicted.step_s or 0), "losses": [measured.losses[0], measured.losses[-1]],
                "tok_s_gpu": measured.tokens_per_s_per_gpu, "planned_gib": row.case.predicted.allocated_bytes / 2**30,
                **{f"{name}_gib": size for name, size in most.items()}, **_routing(measured),
            })  # fmt: skip
    record = {
        "case": f"penteract bench, {asked.file.name}", **provenance("python benchmarks/sweep_record.py", asked.commit), **about,
        "preset": question.preset, "gpus": question.gpus, "timed_by": "host" if asked.by_host else "device",
        "not_measured": wanted, "rows": sorted(rows, key=lambda row: row["name"]),
    }  # fmt: skip
    print(json.dumps(record, indent=1))


def as_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a case as its folder has them: a list is one word."""
    return {key: "+".join(value) if isinstance(value, list | tuple) else value for key, value in values.items()}


def _routing(measured: CaseMeasurement) -> dict[str, Any]:
    """How unevenly rows were sent to the experts of ranks: of the rank with the most memory, in the step of which memory
    was measured."""
    if not measured.routed_rows:
        return {}
    rows = measured.routed_rows[measured.fullest]
    return {"imbalance": measured.imbalance, "routed": {"rank": measured.fullest, "rows": list(rows)}}


if __name__ == "__main__":
    main()
