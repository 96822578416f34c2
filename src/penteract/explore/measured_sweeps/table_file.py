"""A CSV or JSON that the reader has, as a table of cases. Its content comes with the question; no file is opened."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from penteract.errors import BadInput
from penteract.explore.measured_sweeps.case_table import CaseTable, table_of
from penteract.measure.results.csv_rows import flat_row
from penteract.measure.schemas.sweep import Sweep
from penteract.measure.schemas.typed_json import from_json
from penteract.units import printable

MOST_ROWS, MOST_COLUMNS = 200_000, 200


@lru_cache(maxsize=2)  # of the same file much is asked, one question after another
def read_table(name: str, text: str) -> CaseTable:
    """The table in a file's text. Raises BadInput for what is none."""
    body = text.removeprefix("\ufeff")
    if body.lstrip()[:1] in ("{", "["):
        return _from_json(name, body)
    return table_of(_csv_rows(name, body), name)


def _csv_rows(name: str, text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    mark = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=mark))
    except csv.Error as error:
        raise _wrong(name, f"no CSV: {error}") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    head = [cell.strip() for cell in rows[0]] if rows else []
    if len(rows) < 2 or len(head) < 2:
        raise _wrong(name, "no table: it needs a line of names, and a line for each case")
    _check(name, len(rows) - 1, len(head))
    return [dict(zip(head, row, strict=False)) for row in rows[1:]]


def _from_json(name: str, text: str) -> CaseTable:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, f"no JSON: {error}") from None
    tree = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if "settings" in tree:
        try:
            return table_of_sweep(from_json(Sweep, {k: tree[k] for k in ("settings", "rows") if k in tree}))
        except (ValueError, RecursionError) as error:
            raise _wrong(name, f"not what `penteract bench show --json` prints: {error}") from None
    given = cast("object", tree.get("rows", found))
    rows = cast("list[Any]", given) if isinstance(given, list) else []
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise _wrong(name, "no table: a list of objects, one a case, or what `penteract bench show --json` prints")
    flat = [_flat(row) for row in cast("list[dict[str, Any]]", rows)]
    _check(name, len(flat), max(map(len, flat)))
    return table_of(flat, name)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """An object as columns: those inside of it by their path; lists are left out."""
    found = dict[str, Any]()
    for key, value in row.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            found |= {f"{key}.{k}": v for k, v in inner.items() if not isinstance(v, dict | list)}
        elif not isinstance(value, list):
            found[key] = value
    return found


def table_of_sweep(sweep: Sweep, notes: Sequence[str] = ()) -> CaseTable:
    """A sweep of ours as a table: the columns of its CSV."""
    settings = sweep.settings
    return table_of([flat_row(row) for row in sweep.rows], settings.name, command=settings.command, notes=notes)


def _check(name: str, rows: int, columns: int) -> None:
    if rows > MOST_ROWS or columns > MOST_COLUMNS:
        raise BadInput("FILE", "too large a table", where=printable(name, 80), found=f"{rows} rows, {columns} columns",
                       allowed=f"{MOST_ROWS} rows of {MOST_COLUMNS} columns")  # fmt: skip


def _wrong(name: str, what: str) -> BadInput:
    return BadInput("FILE", printable(what, 200), where=printable(name, 80),
                    fix="a CSV with a line of names, or JSON of penteract bench show --json")  # fmt: skip
