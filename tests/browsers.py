"""A browser of this machine for tests of the page. Where there is none, the last lines of the run say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# As people have it.
WINDOWED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The shell is the same engine without a window, tabs and extensions: pages take a third less of the cores.
NAMES = ("chromium-headless-shell", *WINDOWED)
# Nothing here has a GPU: without this, a process that plays one draws all.
FLAGS = ("--no-sandbox", "--force-color-profile=srgb", "--disable-gpu")
MISSING = "no browser here, so the explorer's page was not tested: apt-get install chromium-headless-shell"


def browser_path(names: tuple[str, ...] = NAMES) -> str | None:
    """Where the first of them is that is here; None if there is none."""
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for the tests of a file: while it runs, playwright's event loop does, and there can be no other."""
    if (path := browser_path()) is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield running
        running.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if any(MISSING in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(MISSING, yellow=True)
