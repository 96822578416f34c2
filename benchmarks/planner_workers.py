"""Seconds of searches by how many workers look ahead, on a machine of many cores on which nothing else runs.

    python benchmarks/planner_workers.py

Each search runs in turns with every number of workers, in one interpreter. The record is
benchmarks/results/planner_workers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from provenance import hexadecimal, provenance

from penteract import plan
from penteract.planner.plan import Plan

RECORD = Path(__file__).parent / "results" / "planner_workers.json"
# Each with the numbers of workers, and how often.
SEARCHES = {
    "llama-3.1-8b on 8xH200": (("llama-3.1-8b", "8xH200"), (0, 1, 3, 7), 3),
    "llama-3.1-405b on 64x8xH100": (("llama-3.1-405b", "64x8xH100"), (0, 1, 3, 7, 15), 2),
}


def answer(found: Plan) -> list[str]:
    """What must not depend on the number of workers."""
    return [found.ask.text(one.layout) for one in found.layouts] + [str(found.counts)]


def measured(of: tuple[str, str], numbers: tuple[int, ...], times: int) -> dict[str, list[float]]:
    """Seconds by number of workers. Raises ValueError if an answer differs."""
    seconds: dict[str, list[float]] = {str(n): [] for n in numbers}
    answers = set[str]()
    for _ in range(times):
        for n in numbers:
            began = time.perf_counter()
            found = plan(*of, batch="1Mi", workers=n)
            seconds[str(n)].append(round(time.perf_counter() - began, 3))
            answers.add("\n".join(answer(found)))
    if len(answers) > 1:
        raise ValueError(f"{of}: answers differ: {answers}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", type=hexadecimal, default="", help="the commit, where there is no git repository")
    args = parser.parse_args()
    searches = {name: measured(*search) for name, search in SEARCHES.items()}
    record = {
        **provenance("python benchmarks/planner_workers.py", args.commit), "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)), "seconds": searches,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name, seconds in searches.items():
        print(name, {n: statistics.median(some) for n, some in seconds.items()})


if __name__ == "__main__":
    main()
