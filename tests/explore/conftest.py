"""Pages of the explorer that tests of a file share; and axe, from npm, which checks that all can use them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from explore.opened import Opened, opened
from explore.served import Served, served

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe, installed the first time."""
    file = HERE / "node_modules" / "axe-core" / "axe.min.js"
    if not file.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, so axe was not run")
        with (HERE / "package-lock.json").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other shard may install it at this moment
            if not file.is_file():
                subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    """Those of `penteract explore` in the file's tests."""
    return ()


@pytest.fixture(scope="session")
def plain() -> Generator[Served]:
    """An explorer without options, for all files whose tests need no other: starting one takes seconds of a core."""
    with served() as running:
        running.open()
        yield running


@pytest.fixture(scope="module")
def here(browser: Any, options: tuple[str, ...], request: pytest.FixtureRequest) -> Generator[Served]:
    if not options:
        yield request.getfixturevalue("plain")
        return
    with served(*options) as running:
        running.open()
        yield running


@pytest.fixture(scope="module")
def shared(browser: Any, here: Served) -> Generator[Opened]:
    """One page for tests that only look; nothing may ever be said on its console."""
    with opened(browser, here) as page:
        yield page
        assert page.said == []
