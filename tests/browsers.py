"""A browser of this machine for tests of the page. Where there is none, the last lines of the run say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no browser here, so the explorer's page was not tested: apt-get install chromium"


def browser_path() -> str | None:
    """Where the browser is; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for the tests of a file: while it runs, playwright's event loop does, and there can be no other."""
    if (path := browser_path()) is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--force-color-profile=srgb"])
        yield running
        running.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if any(MISSING in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(MISSING, yellow=True)
