"""The tests that docs/reliability.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_each_named_test_exists() -> None:
    rows = [line.split("|")[-2] for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    named = [name for row in rows for name in re.findall(r"`([\w/]+(?:\.py)?)`", row)]
    assert len(named) > 30
    for name in named:
        path = TESTS / name.removeprefix("tests/")
        assert path.exists() or list(TESTS.rglob(name.removeprefix("hf/").removeprefix("data/"))), name


def test_each_row_has_a_test_or_says_why_not() -> None:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[-1] not in ("Test",):
            assert "`" in cells[-1] or cells[-1].startswith("none"), line
