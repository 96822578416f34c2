"""CPU seconds of a plan, beside those of another commit on the same machine.

    git worktree add ../base 775ee51
    python benchmarks/planner_speed.py --base ../base

Both trees plan in alternation, each time in a fresh interpreter with nothing imported or known yet but the package;
seconds are `time.process_time`, which others on the machine lengthen less than they do the clock on the wall, so the
ratio of the medians is what to look at. One more plan of each counts what an estimate and a played time take inside of the
search, which is timed apart as that takes time itself. The record is benchmarks/results/planner_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from provenance import ROOT, provenance

RECORD = Path(__file__).parent / "results" / "planner_speed.json"
ASKED = {
    "llama-3.1-8b on 8xH200": ("llama-3.1-8b", "8xH200", "1Mi"),
    "llama-3.1-405b on 64x8xH100": ("llama-3.1-405b", "64x8xH100", "1Mi"),
}
_PLAN = """
import json, sys, time
from penteract import plan

spent = {}

def timed(name, others):
    # By the names of this tree, or by those of the base.
    estimator = next(getattr(m, n) for m in list(sys.modules.values()) for n in ("Estimator", "Quoter") if hasattr(m, n))
    name = name if hasattr(estimator, name) else others.get(name, name)
    asked = getattr(estimator, name, None)
    if asked is None:
        return
    def method(*about):
        began = time.process_time()
        said = asked(*about)
        times, seconds = spent.get(name, (0, 0.0))
        spent[name] = times + 1, seconds + time.process_time() - began
        return said
    setattr(estimator, name, method)

model, gpus, batch, apart = sys.argv[1:]
for name in ("estimate", "closer", "first", "time") if apart == "apart" else ():
    timed(name, {"estimate": "quote"})
began = time.process_time()
found = plan(model, gpus, batch=batch)
seconds = time.process_time() - began
counts = {name: getattr(found.counts, name) for name in ("enumerated", "priced", "fit", "simulated")}
best = [found.ask.text(one.layout) for one in found.layouts]
print(json.dumps({"seconds": seconds, "counts": counts, "spent": spent, "best": best}))
"""


def planned(tree: Path, asked: tuple[str, str, str], *, apart: bool = False) -> dict[str, Any]:
    """One plan by the package of a tree."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, *asked, "apart" if apart else "alone"],
        env={**os.environ, "PYTHONPATH": str(tree / "src")}, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def told(runs: list[dict[str, Any]], apart: dict[str, Any]) -> dict[str, Any]:
    """Of one tree."""
    seconds = [run["seconds"] for run in runs]
    return {
        "seconds": {"median": round(statistics.median(seconds), 3), "least": round(min(seconds), 3),
                    "most": round(max(seconds), 3)},
        "counts": runs[0]["counts"],
        "milliseconds_each": {name: round(1e3 * s / n, 3) for name, (n, s) in apart["spent"].items()},
        "asked": {name: n for name, (n, _) in apart["spent"].items()},
    }  # fmt: skip


def compared(base: Path, asked: tuple[str, str, str], times: int) -> dict[str, Any]:
    """Both trees in turns."""
    runs: dict[Path, list[dict[str, Any]]] = {base: [], ROOT: []}
    for _ in range(times):
        for tree, own in runs.items():
            own.append(planned(tree, asked))
    before, now = (told(own, planned(tree, asked, apart=True)) for tree, own in runs.items())
    ratio = now["seconds"]["median"] / before["seconds"]["median"]
    return {"ratio": round(ratio, 3), "base": before, "now": now, "best": runs[ROOT][0]["best"][:3]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True, help="a tree of the commit to compare with")
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    base = args.base.resolve()
    at = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=base, capture_output=True, text=True, check=True)
    record = {
        **provenance("python benchmarks/planner_speed.py --base ../base"),
        "base_commit": at.stdout.strip(),
        "python": platform.python_version(),
        "runs": args.times,
        "plans": {name: compared(base, asked, args.times) for name, asked in ASKED.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name, plan in record["plans"].items():  # type: ignore[union-attr]
        print(name, plan["ratio"], plan["base"]["seconds"], plan["now"]["seconds"], plan["now"]["milliseconds_each"])


if __name__ == "__main__":
    main()
