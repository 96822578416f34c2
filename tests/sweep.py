"""Run every layout of `sweep_cases` on one pool of ranks, and write down how it went.

    python tests/sweep.py                      all that has not been run with these sources
    python tests/sweep.py --slice 0/20         every 20th case from the first
    python tests/sweep.py --fresh              forget what was run

Progress goes to build/sweep.jsonl, a line a case; it is resumed unless a source of the package or of the tests has
changed. When all cases have been run, benchmarks/results/test_all.json is written. Exit status 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from typing import Any

import torch

from drawn_lines import ROOT, digest, kept_lines
from layouts import Case, Verdict, run_case
from penteract._version import __version__
from pool import Pool
from sweep_cases import WORLDS, possible_pairs, sweep

PROGRESS = ROOT / "build" / "sweep.jsonl"
RESULT = ROOT / "benchmarks" / "results" / "test_all.json"
OBSERVERS = ("forks", "layouts", "observe", "oracle", "pool", "samples", "tolerances")


def done(sources: str) -> dict[str, dict[str, Any]]:
    """case -> its line, of the cases that were run with these sources."""
    return {line["case"]: line for line in kept_lines(PROGRESS, sources)}


def verdict(pool: Pool, case: Case) -> dict[str, Any]:
    """Run one case; its line."""
    began, failure = time.monotonic(), ""
    verdicts: list[Verdict] = []
    try:
        verdicts = pool.run(run_case, case)
    except RuntimeError as error:
        failure = str(error)
    red = [f"rank {rank}: {v}" for rank, v in enumerate(verdicts) if v.red]
    return {
        "case": repr(case),
        "failure": failure or "\n".join(red),
        "gradient": max((v.gradient for v in verdicts), default=0.0),
        "loss": max((v.loss for v in verdicts), default=0.0),
        "seconds": round(time.monotonic() - began, 3),
    }


def run(cases: list[Case], sources: str) -> dict[str, dict[str, Any]]:
    """Run what is left of `cases`; the lines of all."""
    lines = done(sources)
    left = [case for case in cases if repr(case) not in lines]
    print(f"{len(cases)} cases, {len(cases) - len(left)} of them done before with sources {sources}")
    PROGRESS.parent.mkdir(exist_ok=True)
    pool, began = Pool(max(WORLDS)), time.monotonic()
    with PROGRESS.open("a") as out:
        for i, case in enumerate(left, 1):
            line = verdict(pool, case)
            lines[line["case"]] = line
            print(json.dumps({"sources": sources, **line}), file=out, flush=True)
            if line["failure"]:
                print(f"FAILED {case}\n{line['failure'][-2000:]}", flush=True)
            if i % 20 == 0 or i == len(left):
                spent = time.monotonic() - began
                print(f"{i}/{len(left)}  {spent:.0f} s, {spent / i * (len(left) - i):.0f} s to go", flush=True)
    if left:
        pool.close()
    return {repr(case): lines[repr(case)] for case in cases}


def commit() -> str:
    """The commit of this tree, and whether the tree differs from it."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def record(lines: dict[str, dict[str, Any]], sources: str, pairs: int) -> dict[str, Any]:
    """What is committed of a whole sweep."""
    failed = [line for line in lines.values() if line["failure"]]
    return {
        "command": "python tests/sweep.py",
        "commit": commit(),
        "sources": sources,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "cases": len(lines),
        "passed": len(lines) - len(failed),
        "failed": len(failed),
        "option_pairs_covered": pairs,
        "option_pairs_possible": len(possible_pairs()),
        "seconds": round(sum(line["seconds"] for line in lines.values()), 1),
        "worst_gradient_error": max(line["gradient"] for line in lines.values()),
        "worst_loss_error": max(line["loss"] for line in lines.values()),
        "failures": [{"case": line["case"], "failure": line["failure"][-2000:]} for line in failed],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Every legal layout of 2, 4 and 8 ranks against one process.")
    parser.add_argument("--slice", default="0/1", help="I/N: every N-th case from the I-th; writes no record")
    parser.add_argument("--fresh", action="store_true", help="forget what was run")
    said = parser.parse_args()
    first, step = map(int, said.slice.split("/"))
    if said.fresh:
        PROGRESS.unlink(missing_ok=True)
    torch.set_num_threads(1)
    sources = digest("", (f"{name}.py" for name in OBSERVERS))
    cases, coverage = sweep()
    lines = run(cases[first::step], sources)
    if step == 1:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(record(lines, sources, len(coverage.covered)), indent=1) + "\n")
    failed = sum(bool(line["failure"]) for line in lines.values())
    print(f"{len(lines) - failed} passed, {failed} failed")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
