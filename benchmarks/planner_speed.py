"""CPU seconds of a plan, against those of another commit on the same computer.

    git worktree add ../base 775ee51
    python benchmarks/planner_speed.py --base ../base

Both trees plan in turns, each time in a new interpreter that has only imported the planner. Seconds are
`time.process_time`: other processes change it less than wall-clock time. Compare the ratio of the medians. One more plan of
each tree measures the time of single estimates, bounds and simulations within the search. It is separate because measuring
takes time, too. The record is benchmarks/results/planner_speed.json.
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
# Each with how often `--times` it runs: one that takes a third of a second differs more from run to run.
SEARCHES = {
    "llama-3.1-8b on 8xH200": (("llama-3.1-8b", "8xH200", "1Mi"), 5),
    "llama-3.1-405b on 64x8xH100": (("llama-3.1-405b", "64x8xH100", "1Mi"), 1),
}
_PLAN = """
import importlib, json, sys, time
from penteract import plan

for name in ("plan", "question", "search.collector"):  # `plan` imports these when it is called, where the base did before
    try:
        importlib.import_module("penteract.planner." + name)
    except ModuleNotFoundError:  # the base names them otherwise
        pass
spent = {}

def timed(name, others):
    # The class and its method have the names of this tree or those of the base. Other packages are left out:
    # `urllib.parse` has a `Quoter`, too.
    own = [module for path, module in sys.modules.items() if path.partition(".")[0] == "penteract"]
    estimator = next(getattr(m, n) for m in own for n in ("Estimator", "Quoter") if hasattr(m, n))
    name = name if hasattr(estimator, name) else others.get(name, name)
    original = getattr(estimator, name, None)
    if original is None:
        return
    def method(*arguments):
        began = time.process_time()
        result = original(*arguments)
        times, seconds = spent.get(name, (0, 0.0))
        spent[name] = times + 1, seconds + time.process_time() - began
        return result
    setattr(estimator, name, method)

model, gpus, batch, apart = sys.argv[1:]
for name in ("estimate", "played", "closer", "first", "time") if apart == "apart" else ():
    timed(name, {"estimate": "quote"})
began = time.process_time()
found = plan(model, gpus, batch=batch)
seconds = time.process_time() - began
counts = {name: getattr(found.counts, name) for name in ("enumerated", "priced", "fit", "simulated")}
best = [found.ask.text(one.layout) for one in found.layouts]
print(json.dumps({"seconds": seconds, "counts": counts, "spent": spent, "best": best}))
"""


def planned(tree: Path, search: tuple[str, str, str], *, apart: bool = False) -> dict[str, Any]:
    """One plan by the package of a tree. `apart`: also measure single methods of the estimator."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, *search, "apart" if apart else "alone"],
        env={**os.environ, "PYTHONPATH": str(tree / "src")}, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def summary(runs: list[dict[str, Any]], apart: dict[str, Any]) -> dict[str, Any]:
    """The record of one tree."""
    seconds = [run["seconds"] for run in runs]
    return {
        "seconds": {"median": round(statistics.median(seconds), 3), "least": round(min(seconds), 3),
                    "most": round(max(seconds), 3)},
        "counts": runs[0]["counts"],
        "milliseconds_each": {name: round(1e3 * s / n, 3) for name, (n, s) in apart["spent"].items()},
        "asked": {name: n for name, (n, _) in apart["spent"].items()},
    }  # fmt: skip


def compared(base: Path, search: tuple[str, str, str], times: int) -> dict[str, Any]:
    """The record of both trees, which plan in turns."""
    runs: dict[Path, list[dict[str, Any]]] = {base: [], ROOT: []}
    for _ in range(times):
        for tree, own in runs.items():
            own.append(planned(tree, search))
    before, now = (summary(own, planned(tree, search, apart=True)) for tree, own in runs.items())
    ratio = now["seconds"]["median"] / before["seconds"]["median"]
    return {"runs": times, "ratio": round(ratio, 3), "base": before, "now": now, "best": runs[ROOT][0]["best"][:3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a working tree of the commit to compare with")
    parser.add_argument("--times", type=int, default=5, help="plans of each tree; of a short one five times as many")
    args = parser.parse_args()
    base = args.base.resolve()
    at = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=base, capture_output=True, text=True, check=True)
    record = {
        **provenance("python benchmarks/planner_speed.py --base ../base"),
        "base_commit": at.stdout.strip(),
        "python": platform.python_version(),
        "processes": 1,  # each search runs in one
        "plans": {name: compared(base, search, often * args.times) for name, (search, often) in SEARCHES.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name, plan in record["plans"].items():  # type: ignore[union-attr]
        print(name, plan["ratio"], plan["base"]["seconds"], plan["now"]["seconds"], plan["now"]["milliseconds_each"])


if __name__ == "__main__":
    main()
