"""A command line whose engine is a list: what would have started, and nothing starts."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penteract.cli import main
from penteract.engine.runtime.prepared import PreparedRanks


@dataclass(frozen=True)
class Told:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to run in, and no launcher around."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The calls of `penteract.engine.runtime.start.train`, which does nothing else."""
    calls: list[dict[str, Any]] = []
    engine = ModuleType("penteract.engine.runtime.start")
    engine.train = lambda resolved, **how: calls.append({"resolved": resolved, **how}) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penteract.engine.runtime.start", engine)
    monkeypatch.setattr(PreparedRanks, "of", lambda world, environment, gpus: None)
    yield calls


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], started: list[dict[str, Any]]) -> Callable[..., Told]:
    """Run one command line in process."""

    def run(*words: object) -> Told:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return Told(code, printed.out, printed.err)

    return run
