"""Seconds of a plan, against those of another commit on the same computer: alone, and with workers.

    git worktree add ../base 775ee51
    python benchmarks/planner_speed.py --base ../base

The other commit, this one in a single process, and this one with its workers plan in turns, each time in a new interpreter
that has only imported the planner. Seconds pass by the clock on the wall: nothing else should run. CPU seconds are those of
all processes; other programs change them less. Compare the ratios of the medians. One more plan of each tree measures the time
of single estimates, bounds and simulations within the search. It is separate because measuring takes time, too. The record is
benchmarks/results/planner_speed.json.
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
import importlib, inspect, json, os, resource, sys, time
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

model, gpus, batch, how = sys.argv[1:]
for name in ("memory_of", "estimate", "played", "closer", "first", "time") if how == "apart" else ():
    timed(name, {"estimate": "quote"})
alone = {"workers": 0} if how != "workers" and "workers" in inspect.signature(plan).parameters else {}
began, cpu = time.perf_counter(), time.process_time()
found = plan(model, gpus, batch=batch, **alone)
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
try:  # usage counts only processes whose end is collected
    while True:
        os.wait()
except ChildProcessError:
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu += others.ru_utime + others.ru_stime
counts = {name: getattr(found.counts, name) for name in ("enumerated", "priced", "fit", "simulated")}
best = [found.ask.text(one.layout) for one in found.layouts]
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "counts": counts, "spent": spent, "best": best}))
"""


def planned(tree: Path, search: tuple[str, str, str], how: str) -> dict[str, Any]:
    """One plan by the package of a tree: "alone" in one process, with "workers", or alone with single methods of the
    estimator measured "apart"."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, *search, how],
        env={**os.environ, "PYTHONPATH": str(tree / "src")}, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def spread(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The median, the least and the most of a number."""
    numbers = [run[name] for run in runs]
    return {
        "median": round(statistics.median(numbers), 3),
        "least": round(min(numbers), 3),
        "most": round(max(numbers), 3),
    }


def summary(runs: list[dict[str, Any]], apart: dict[str, Any]) -> dict[str, Any]:
    """The record of one tree."""
    return {
        "seconds": spread(runs, "seconds"), "cpu_seconds": spread(runs, "cpu_seconds"), "counts": runs[0]["counts"],
        "milliseconds_each": {name: round(1e3 * s / n, 3) for name, (n, s) in apart["spent"].items()},
        "asked": {name: n for name, (n, _) in apart["spent"].items()},
    }  # fmt: skip


def compared(base: Path, search: tuple[str, str, str], times: int) -> dict[str, Any]:
    """The record of a search, planned in turns. Raises ValueError if answers of this tree differ."""
    ways = {"base": (base, "alone"), "alone": (ROOT, "alone"), "now": (ROOT, "workers")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(times):
        for name, (tree, how) in ways.items():
            runs[name].append(planned(tree, search, how))
    if any(run[what] != runs["now"][0][what] for run in (*runs["alone"], *runs["now"]) for what in ("best", "counts")):
        raise ValueError(f"{search}: an answer with workers differs from one without")
    apart = {"base": planned(base, search, "apart"), "alone": planned(ROOT, search, "apart")}
    found = {name: summary(runs[name], apart[name]) for name in apart}
    found["now"] = {name: spread(runs["now"], name) for name in ("seconds", "cpu_seconds")}
    median = {name: one["seconds"]["median"] for name, one in found.items()}
    ratios = {
        "ratio": round(median["now"] / median["base"], 3),
        "ratio_alone": round(median["alone"] / median["base"], 3),
    }
    return {"runs": times, **ratios, **found, "best": runs["now"][0]["best"][:3]}


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
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "plans": {name: compared(base, search, often * args.times) for name, (search, often) in SEARCHES.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name, plan in record["plans"].items():  # type: ignore[union-attr]
        print(name, plan["ratio"], plan["ratio_alone"], *[plan[way]["seconds"] for way in ("base", "alone", "now")])


if __name__ == "__main__":
    main()
