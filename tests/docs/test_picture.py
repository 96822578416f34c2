"""The pictures in docs/ are what the scripts beside them draw, and one of them is a penteract."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[2] / "docs"


def test_picture_is_up_to_date() -> None:
    draw = runpy.run_path(str(DOCS / "picture.py"))["picture"]
    assert (DOCS / "picture.svg").read_text(encoding="utf-8") == draw()


def test_timeline_is_up_to_date() -> None:
    draw = runpy.run_path(str(DOCS / "timeline.py"))["picture"]
    assert (DOCS / "timeline.svg").read_text(encoding="utf-8") == draw()


def test_flow_is_up_to_date() -> None:
    draw = runpy.run_path(str(DOCS / "flow.py"))["picture"]
    assert (DOCS / "flow.svg").read_text(encoding="utf-8") == draw()


def test_corners_and_edges() -> None:
    root = ElementTree.parse(DOCS / "picture.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    lines = [line for line in root.iter(f"{svg}line") if not line.get("marker-end")]
    assert len(list(root.iter(f"{svg}circle"))) == 32
    assert len(lines) == 80 and len({line.get("stroke") for line in lines}) == 5
