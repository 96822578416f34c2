"""2,000 layouts, shuffled, asked of one estimator after each other: bit for bit what fresh ones answer. Run by
`make test-all`, which leaves the result in benchmarks/results/asked_2000.json.

Both kernels of the loss, every schedule, every stage of ZeRO and all else that a layout says, of four models; half of
the layouts differ from another in few fields. Then the estimator of a whole search is asked the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.planner.ask import Ask
from penteract.planner.plan import plan_layouts
from penteract.readings.estimator import Estimator
from readings.asked import ASKINGS, LENGTH, WORLD, Asking, answers, drawn_layouts, unlike

ROOT = Path(__file__).resolve().parent.parent
EACH, SEED = 500, 7
OF_A_SEARCH = 100  # layouts that the estimator of a search is asked, of each model
RESULT = ROOT / "benchmarks" / "results" / "asked_2000.json"


def searched(asking: Asking) -> Estimator:
    """An estimator that a search has used."""
    prices = asking.estimator()
    ask = Ask(model=asking.model, cluster=cluster("2x8xH100"), sequence_length=LENGTH, global_batch_size=2 * WORLD,
              precision=asking.precision)  # fmt: skip
    plan_layouts(ask, lambda _: prices)
    return prices


def main() -> int:
    began, told, red = time.process_time(), dict[str, Any](), list[str]()
    for name, asking in ASKINGS.items():
        layouts = drawn_layouts(asking, EACH, SEED)
        wrong = [*unlike(asking, layouts)]
        used = searched(asking)
        after = [lay for lay in layouts[:OF_A_SEARCH] if answers(used, lay) != answers(asking.estimator(), lay)]
        told[name] = {
            "layouts": len(layouts), "schedules": _drawn(layouts, "schedule"), "losses": _drawn(layouts, "loss"),
            "stages_of_zero": _drawn(layouts, "zero"), "unlike_fresh": len(wrong), "asked_after_a_search": OF_A_SEARCH,
            "unlike_fresh_then": len(after),
        }  # fmt: skip
        red += [f"{name}: {layout}: {', '.join(where)}" for layout, where in wrong]
        red += [f"{name}, after a search: {layout}" for layout in after]
        print(f"{name}: {told[name]}", flush=True)
    record = {
        "command": "python tests/asked_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d"), "seed": SEED,
        "layouts": EACH * len(ASKINGS), "cpu_seconds": round(time.process_time() - began, 1), "models": told,
        "failures": red,
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(red) or "all as fresh ones answer")
    return bool(red)


def commit() -> str:
    """The commit of the sources, and whether they differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "-dirty" * bool(git("status", "--porcelain", "--", "src"))


def _drawn(layouts: list[Layout], field: str) -> dict[str, int]:
    values = [getattr(layout, field) for layout in layouts]
    return {value: values.count(value) for value in sorted(set(values))}


if __name__ == "__main__":
    sys.exit(main())
