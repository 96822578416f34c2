"""Writes benchmarks/results/test_hosts.json when all tests of hosts have run: `make test-hosts`."""

from __future__ import annotations

import json
import platform
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows, found = session.config.stash[_ROWS], session.config.stash[_FOUND]
    if len(rows) < 5 or any(row["outcome"] == "skipped" for row in rows.values()):
        return
    record = {
        "command": "make test-hosts", "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "tests": {name: row | found.get(name, {}) for name, row in rows.items()},
        "seconds": round(sum(row["seconds"] for row in rows.values()), 1),
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
