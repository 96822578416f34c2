"""Every example runs, asserts what it claims, and ends within a minute of one core."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT = 60  # seconds of a core: other tests run beside it
COMMANDS = "07_measure"  # it starts half a dozen commands, each of which would load torch


def run(path: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """To its end, and what it took of cores, in seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if path.stem == COMMANDS:
        return forks.script(path, environment, limit=3 * LIMIT)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=3 * LIMIT, env=environment, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs(path: Path) -> None:
    done, seconds = run(path)
    assert done.returncode == 0, done.stderr
    assert 0 < seconds <= LIMIT
    assert done.stdout.strip() and not done.stderr


def test_are_numbered_in_reading_order() -> None:
    assert [p.name[:2] for p in EXAMPLES] == [f"{i:02}" for i in range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_fits_a_terminal(path: Path) -> None:
    """Short enough to be read in one sitting."""
    assert len(path.read_text().splitlines()) <= 160
