"""Writes benchmarks/results/test_hosts.json when all tests of hosts have run: `make test-hosts`."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asked_long import commit
from penteract._version import __version__

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "test_hosts.json"
Record = dict[str, Any]


def pytest_configure(config: pytest.Config) -> None:
    """Also where `pytest tests` meets this folder long after its session has begun."""
    config.stash[_ROWS], config.stash[_FOUND] = {}, {}


_ROWS, _FOUND = pytest.StashKey[Record](), pytest.StashKey[Record]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Adds a number to the record of this test."""
    found = request.config.stash[_FOUND].setdefault(request.node.name, {})
    return lambda name, value: found.update({name: round(value, 1)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.config.stash[_ROWS][item.name] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
    return report


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for: other work on the machine does not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows, found = session.config.stash[_ROWS], session.config.stash[_FOUND]
    if len(rows) < 5 or any(row["outcome"] == "skipped" for row in rows.values()):
        return
    record = {
        "command": "make test-hosts", "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "tests": {name: row | found.get(name, {}) for name, row in rows.items()},
        "seconds": round(sum(row["seconds"] for row in rows.values()), 1), "cpu_seconds": round(_cpu_seconds(), 1),
        "cores": os.cpu_count(), "load": [round(n, 1) for n in os.getloadavg()],
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
