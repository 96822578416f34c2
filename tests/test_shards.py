"""Shards keep their word: what is alone has nothing beside it, and one fault in any shard is a fault of the whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone  # it looks at what runs at one moment

HERE = Path(__file__).parent
BODY = """
import os, time
import pytest
from pathlib import Path
from types import SimpleNamespace

LOG = Path(__file__).parent / "log"

def spend(name):
    begun = time.monotonic()
    time.sleep(0.05)
    with LOG.open("a") as log:
        log.write(f"{name} {os.getpid()} {begun} {time.monotonic()}\\n")

@pytest.fixture
def pool():
    def close():
        with LOG.with_name("closed").open("a") as closed:
            closed.write(f"{time.monotonic()}\\n")
    return SimpleNamespace(close=close)

@pytest.mark.parametrize("n", range(8))
def test_beside(n):
    spend("beside")

@pytest.mark.parametrize("n", range(4))
def test_ranks(n, pool):
    spend("ranks")

@pytest.mark.alone
@pytest.mark.parametrize("n", range(4))
def test_alone(n):
    spend("alone")
    assert n < 3

@pytest.mark.waits
@pytest.mark.parametrize("n", range(4))
def test_waits(n):
    spend("waits")
"""


def test_what_is_alone_is_alone_and_a_fault_is_told(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(BODY)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    alone: nothing beside it\n    waits: its kind beside it\n"
    )
    words = ["-m", "pytest", "-p", "shards", "-n", "3", "--dist", "loadfile", "--import-mode=importlib", "-q"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.fullmatch(r"3 failed, 57 passed in \S+s.*", done.stdout.splitlines()[-1])
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    spans = [(name, pid, float(begun), float(ended)) for name, pid, begun, ended in rows]
    assert len(spans) == 60 and len({pid for _, pid, *_ in spans}) == 3
    own = {kind: [span for span in spans if span[0] == kind] for kind in ("ranks", "beside", "alone", "waits")}
    for kind in ("ranks", "alone"):
        assert len({pid for _, pid, *_ in own[kind]}) == 1
    (closed,) = map(float, (tmp_path / "closed").read_text().splitlines())  # once, when no more tests need the ranks
    assert max(ended for *_, ended in own["ranks"]) < closed
    assert own["ranks"][0][2] < min(begun for *_, begun, _ in own["alone"])
    for one in own["alone"]:
        assert not [two for two in spans if two is not one and meet(one, two)]
    for kind in ("beside", "waits"):
        assert any(meet(a, b) for a in own[kind] for b in own[kind] if a[1] != b[1])
    assert any(meet(a, b) for a in own["ranks"] for b in own["beside"])
    assert not [b for a in own["waits"] for b in spans if b[0] != "waits" and meet(a, b)]


def meet(a: tuple[str, str, float, float], b: tuple[str, str, float, float]) -> bool:
    """Whether both ran at one moment."""
    return a[2] < b[3] and b[2] < a[3]
