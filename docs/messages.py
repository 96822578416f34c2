"""Write the messages of `explore.md` from the schema of the explorer's page.

python docs/messages.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints, is_typeddict

from penteract.explore.schemas import (
    bench_schema,
    page_schema,
    page_values,
    profile_schema,
    ranks_schema,
    runs_schema,
    schedule_schema,
    search_schema,
)

MODULES = (
    page_values, page_schema, schedule_schema, search_schema, ranks_schema, runs_schema, profile_schema, bench_schema,
)  # fmt: skip
PAGE = Path(__file__).with_name("explore.md")
HEADING = "## Messages\n\n"


def messages() -> str:
    """A table for each message, with what its docstring says of the fields."""
    return (
        "\n\n".join(table(found) for module in MODULES for found in vars(module).values() if is_own(found, module))
        + "\n"
    )


def is_own(found: object, module: ModuleType) -> bool:
    return is_typeddict(found) and found.__module__ == module.__name__


def table(message: Any) -> str:
    """One message."""
    head, _, rest = (inspect.getdoc(message) or "").partition("\n\n")
    meanings = dict(meanings_of(rest))
    rows = [f"| `{name}` | {kind(hint)} | {meanings.get(name, '')} |" for name, hint in get_type_hints(message).items()]
    return "\n".join(
        [
            f"### {message.__name__}",
            "",
            " ".join(head.split()),
            "",
            "| field | type | meaning |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def meanings_of(text: str) -> list[tuple[str, str]]:
    """(field, meaning) of lines such as "memory, time  the difference", with the lines that go on below them."""
    found = list[tuple[list[str], str]]()
    for line in text.split("\n"):
        if begins := re.match(r"([a-z_]+(?:, [a-z_]+)*)\s{2,}(.*)", line):
            found.append((begins[1].split(", "), begins[2]))
        elif found and line.strip():
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return [(name, meaning.replace("|", "or")) for names, meaning in found for name in names]


def kind(hint: Any) -> str:
    """A type as text."""
    name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"(penteract\.explore\.\w+|typing)\.", "", name).replace("None", "null").replace("|", "or")


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.split(HEADING)[0] + HEADING + messages(), encoding="utf-8")


if __name__ == "__main__":
    main()
