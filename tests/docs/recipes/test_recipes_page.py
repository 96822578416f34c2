"""The recipes at the end of ARCHITECTURE.md: what each must have, and that what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "penteract"
SECTION = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Where to add …\n")[1]
RECIPES_OF = ("a model", "a dimension", "a schedule", "an op", "a kernel", "a GPU", "a mutation test")


def test_the_section_is_the_last_and_has_these_recipes() -> None:
    assert "\n## " not in SECTION
    assert tuple(re.findall(r"^### … (.+)$", SECTION, re.MULTILINE)) == RECIPES_OF


@pytest.mark.parametrize("name", RECIPES_OF)
def test_a_recipe_is_three_to_six_steps_and_a_test(name: str) -> None:
    recipe = SECTION.split(f"### … {name}\n")[1].split("\n### ")[0]
    steps = re.findall(r"^(\d)\. ", recipe, re.MULTILINE)
    assert 3 <= len(steps) <= 6
    assert steps == [str(i + 1) for i in range(len(steps))]
    assert re.search(r"`tests/[\w/]+\.py`", recipe)


def test_what_the_recipes_name_exists() -> None:
    files = set(re.findall(r"`([\w/]+/[\w./]*(?:\.py|\.toml|\.json|/))`", SECTION))
    assert len(files) > 30
    assert [f for f in files if not any((at / f).exists() for at in (SOURCE, ROOT))] == []
    paths = {path for at in (SOURCE, ROOT / "tests") for path in at.rglob("*.py")} - {
        *Path(__file__).parent.glob("*.py")
    }
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    names = set(re.findall(r"`([A-Za-z_]{3,})`", SECTION))
    assert [n for n in names if not re.search(rf"\b{n}\b", code)] == []
