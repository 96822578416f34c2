"""The published models, as a table and as rows for JSON."""

from __future__ import annotations

from typing import Any

from penteract.config import catalog
from penteract.units import show_count


def catalogue_rows() -> list[dict[str, Any]]:
    """A row for each model, family by family. `parameters` as published."""
    entries = map(catalog.entry, catalog.names())
    return [
        {"name": e.model.name, "parameters": e.parameters, "max_positions": e.model.max_positions, "source": e.source}
        for e in entries
    ]


def catalogue() -> str:
    """A line for each model: name, parameters, most positions, and where its shape was published."""
    head = ("model", "parameters", "max positions", "source")
    found = catalogue_rows()
    rows = [head, *((r["name"], show_count(r["parameters"]), str(r["max_positions"]), r["source"]) for r in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        f"{name:<{widths[0]}}  {count:>{widths[1]}}  {positions:>{widths[2]}}  {source}"
        for name, count, positions, source in rows
    )
