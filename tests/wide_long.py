"""All properties that are marked `wide`, with five times as many examples as `make test` draws or more, and other ones.

    python tests/wide_long.py            all of them
    python tests/wide_long.py WORDS      what `pytest WORDS` chooses; writes no record

Run by `make test-all`, which leaves the result in benchmarks/results/drawn_wide.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asked_long import commit

TESTS = Path(__file__).resolve().parent
RESULT = TESTS.parent / "benchmarks" / "results" / "drawn_wide.json"
SEED = 7


class Rows:
    """What each property drew, and where it failed."""

    def __init__(self, record: bool) -> None:
        self.record, self.began = record, time.strftime("%Y-%m-%d")
        self.draws: dict[str, int] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # of a property; each seed of it adds to its draws

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:  # -m has not chosen yet
            if (mark := item.get_closest_marker("wide")) is not None:
                (self.draws[item.nodeid],) = mark.args

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            name = report.nodeid.split("[")[0]
            row = self.rows.setdefault(name, {"property": name, "draws": 0, "failures": []})
            row["draws"] += self.draws[report.nodeid]
            if report.failed:
                row["failures"].append(f"{report.nodeid}\n{report.longreprtext[-2000:]}")
            print(f" {report.nodeid}: {report.duration:.0f} s", flush=True)
            if self.record:
                self.write()

    def write(self) -> None:
        """All rows so far: what is interrupted has them."""
        record = {
            "command": "python tests/wide_long.py", "commit": commit(), "date": self.began, "seed": SEED,
            "properties": len({name.split("[")[0] for name in self.draws}), "run": len(self.rows),
            "draws": sum(row["draws"] for row in self.rows.values()),
            "failed": sum(bool(row["failures"]) for row in self.rows.values()), "rows": [*self.rows.values()],
        }  # fmt: skip
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


def main(words: list[str]) -> int:
    sys.path.insert(0, str(TESTS.parent))  # as `python -m pytest`: ranks import the tests from there
    told = ["-m", "wide", "--hypothesis-profile=wide", f"--hypothesis-seed={SEED}", *(words or [str(TESTS)])]
    return int(pytest.main(told, plugins=[Rows(record=not words)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
