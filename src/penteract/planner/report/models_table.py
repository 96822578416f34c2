"""The published models, as a table and as rows for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penteract.config import catalog
from penteract.model.count import parameters
from penteract.units import show_count


def catalogue_rows() -> list[dict[str, Any]]:
    """A row for each model, family by family. `parameters` as published."""
    entries = map(catalog.entry, catalog.names())
    return [
        {"name": e.model.name, "parameters": e.parameters, "max_positions": e.model.max_positions, "source": e.source}
        for e in entries
    ]


def _size(row: Mapping[str, Any]) -> str:
    """Parameters as published, and with the layers that predict further tokens, which a plan counts."""
    model = catalog.model(row["name"])
    more = f" ({show_count(parameters(model).total)} with MTP)" if model.mtp_layers else ""
    return show_count(row["parameters"]) + more


def catalogue() -> str:
    """A line for each model: name, parameters, most positions, and where its shape was published."""
    head = ("model", "parameters", "max positions", "source")
    found = catalogue_rows()
    rows = [head, *((r["name"], _size(r), str(r["max_positions"]), r["source"]) for r in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        f"{name:<{widths[0]}}  {count:>{widths[1]}}  {positions:>{widths[2]}}  {source}"
        for name, count, positions, source in rows
    )
