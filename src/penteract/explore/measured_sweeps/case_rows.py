"""Cases as the rows of a table: sorted by any column; what all have in common is said once."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.explore.measured_sweeps.case_table import CaseColumn, CaseTable
from penteract.explore.schemas.bench_schema import BenchOptions, BenchTable
from penteract.units import show_whole


def case_rows(table: CaseTable, cases: Sequence[int], options: BenchOptions) -> BenchTable:
    """The rows; with `first` 0 all of them, as plain numbers."""
    order = _sorted(table, cases, options)
    varies = [column for column in table.columns.values() if len(column.distinct) > 1]
    same = [column for column in table.columns.values() if len(column.distinct) == 1]
    first = options.get("first", 0)
    named = any(column.name in ("case", "name") for column in varies)
    shown = order[:first] if first else order
    cells = [[(_text if first else _plain)(column, i) for column in varies] for i in shown]
    rows = cells if named else [[table.names[i], *row] for i, row in zip(shown, cells, strict=True)]
    found = f"{show_whole(len(shown))} of {show_whole(len(order))} cases" if len(shown) < len(order) else (
        f"{show_whole(len(order))} case{'s' * (len(order) != 1)}")  # fmt: skip
    at = {column.name: next(i for i, v in enumerate(column.values) if v is not None) for column in same}
    return {
        "fields": [*([] if named else [""]), *(column.name for column in varies)], "rows": rows, "total": len(order),
        "found": found,
        "same": " · ".join(f"{column.label} {column.text(at[column.name])}" for column in same),
    }  # fmt: skip


def _text(column: CaseColumn, case: int) -> str:
    return column.text(case)


def _plain(column: CaseColumn, case: int) -> str:
    value = column.values[case]
    return "" if value is None else f"{value:.15g}" if not isinstance(value, str) else value


def _sorted(table: CaseTable, cases: Sequence[int], options: BenchOptions) -> list[int]:
    """The cases by a column; those without a value last."""
    column = table.columns.get(options.get("sort", ""))
    if column is None:
        return list(cases)
    valued = [i for i in cases if column.values[i] is not None]
    valued.sort(key=lambda i: column.values[i], reverse=options.get("descending", False))  # type: ignore[arg-type, return-value]
    return [*valued, *(i for i in cases if column.values[i] is None)]
