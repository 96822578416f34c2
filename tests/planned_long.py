"""Forty drawn questions, each answered by the planner and by simulating every layout: the same best six, in order.

Run by `make test-all`, which leaves the result in benchmarks/results/planned_40.json.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from itertools import count, islice
from pathlib import Path

from asked_long import commit
from penteract.errors import BadInput
from planner.every_layout import check_plan

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "planned_40.json"
QUESTIONS = 40


def row(seed: int) -> dict[str, object] | None:
    """How many layouts of a question were simulated, and where the planner's answer is another; None if it has none."""
    try:
        found = {"seed": seed, "simulated": check_plan(seed), "failure": ""}
    except BadInput as error:
        if "no layout of" not in str(error):
            raise
        return None
    except AssertionError:
        found = {"seed": seed, "simulated": 0, "failure": traceback.format_exc()}
    print(found, flush=True)
    return found


def main() -> int:
    began = time.process_time()
    rows = [*islice(filter(None, map(row, count())), QUESTIONS)]
    record = {
        "command": "python tests/planned_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d"),
        "questions": QUESTIONS, "cpu_seconds": round(time.process_time() - began, 1), "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    red = [row for row in rows if row["failure"]]
    print("\n".join(str(row["failure"]) for row in red) or f"{QUESTIONS} plans are those of simulating every layout")
    return bool(red)


if __name__ == "__main__":
    sys.exit(main())
