"""What checks that the page is usable by all: axe, from npm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe, installed the first time."""
    file = HERE / "node_modules" / "axe-core" / "axe.min.js"
    if not file.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, so axe was not run")
        subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    return file.read_text(encoding="utf-8")
