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


def test_structure_shows_every_package() -> None:
    """Its counts are those of the day that it was drawn on; its packages are today's, and no import leads up."""
    structure, package = runpy.run_path(str(DOCS / "structure.py")), DOCS.parent / "src" / "penteract"
    packages = {p.parent.name for p in package.glob("*/__init__.py")}
    for drawn in (structure["picture"](package, "Now"), (DOCS / "images" / "structure_after.svg").read_text("utf-8")):
        texts = {e.text for e in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}
        assert {f"{name}/" for name in packages} <= texts
    edges = structure["between"](list(structure["imports"](package)), "", packages)
    order = structure["ordered"](packages, edges)
    assert edges and all(order.index(a) < order.index(b) for a, b in edges)


def test_an_import_in_a_circle_leads_up() -> None:
    structure = runpy.run_path(str(DOCS / "structure.py"))
    edges = structure["Edges"]({("a", "b"): 3, ("b", "a"): 1, ("b", "c"): 1})
    assert structure["ordered"]({"a", "b", "c"}, edges) == ["a", "b", "c"]


def test_corners_and_edges() -> None:
    root = ElementTree.parse(DOCS / "picture.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    lines = [line for line in root.iter(f"{svg}line") if not line.get("marker-end")]
    assert len(list(root.iter(f"{svg}circle"))) == 32
    assert len(lines) == 80 and len({line.get("stroke") for line in lines}) == 5
