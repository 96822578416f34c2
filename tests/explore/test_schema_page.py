"""docs/explore.md has every message of the schema, as the schema's module says it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from penteract.explore.schemas.page_schema import MESSAGES, VERSION, Kind

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explore.md").read_text(encoding="utf-8")


def test_the_page_is_what_its_script_writes() -> None:
    sys.path.insert(0, str(DOCS))
    try:
        import messages as script
    finally:
        sys.path.remove(str(DOCS))
    assert PAGE.split(script.HEADING)[1] == script.messages()


def test_the_page_names_every_request_and_answer() -> None:
    assert all(f"### {message.__name__}\n" in PAGE for message in MESSAGES)
    assert f"All have `version` {VERSION}" in PAGE
    for kind in get_args(Kind):
        assert f"| `{kind}` |" in PAGE
