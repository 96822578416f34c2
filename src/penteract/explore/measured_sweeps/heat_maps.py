"""Heat maps over any fields of a table: of each cell the best case, how many it has, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from penteract.explore.measured_sweeps.bench_options import NONE
from penteract.explore.measured_sweeps.case_table import CaseColumn, CaseTable
from penteract.explore.schemas.bench_schema import BenchHeatMap, BenchOptions, HeatMapCell, HeatScale
from penteract.measure.results.cells import CellCases, cells, short_word
from penteract.measure.results.colour_scale import colour, is_dark
from penteract.units import show_whole

_STEPS = 5  # of the scale of colours that have a text
Place = tuple[int, int, int]


def heat_maps(table: CaseTable, cases: Sequence[int], options: BenchOptions) -> BenchHeatMap | None:
    """The maps of these cases; None where no field varies, or there is no number."""
    fields = [_field(table, options.get(name, NONE)) for name in ("panels", "rows", "columns")]
    shown = table.columns.get(options.get("colour", ""))
    if shown is None or not any(fields):
        return None
    texts = [_texts(column, cases) for column in fields]
    order = [{text: i for i, text in enumerate(some)} for some in texts]

    def place(case: int) -> Place:
        panel, row, column = (
            places.get(c.text(case) if c else "", -1) for c, places in zip(fields, order, strict=True)
        )
        return panel, row, column

    by = table.columns.get(table.rate, shown)
    sign = -1.0 if by.kind and by.kind.better == "least" else 1.0

    def value(case: int) -> float | None:
        number = by.number(case)
        return sign * number if number is not None and table.good[case] and shown.number(case) is not None else None

    found = {at: cell for at, cell in cells(cases, place, value).items() if min(at) >= 0}
    numbers = [shown.number(cell.best) or 0.0 for cell in found.values() if cell.good]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    order_of = sorted(found)
    first = max(range(len(order_of)), key=lambda i: _rank(found[order_of[i]], value), default=0)
    best = {"": "the largest", "most": "the largest", "least": "the smallest"}[by.kind.better if by.kind else ""]
    return {
        "colour": shown.label, "source": shown.source, "rows": _label(fields[1]), "columns": _label(fields[2]),
        "panels": _label(fields[0]), "row_texts": texts[1], "column_texts": texts[2], "panel_texts": texts[0],
        "cells": [_cell(table, shown, at, found[at], (low, high)) for at in order_of],
        "scale": _scale(shown, low, high) if numbers else [],
        "best": first, "about": f"Each cell is its case with {best} {by.label}.",
    }  # fmt: skip


def _rank(cell: CellCases[int], value: Callable[[int], float | None]) -> float:
    found = value(cell.best)
    return float("-inf") if found is None else found


def _field(table: CaseTable, name: str) -> CaseColumn | None:
    return None if name == NONE else table.columns.get(name)


def _label(column: CaseColumn | None) -> str:
    return column.label if column else ""


def _texts(column: CaseColumn | None, cases: Sequence[int]) -> list[str]:
    """The values of a field that these cases have, in order; one empty text without a field."""
    if column is None:
        return [""]
    has = {column.values[case] for case in cases}
    at = {value: i for i, value in enumerate(column.values)}
    return [column.text(at[value]) for value in column.distinct if value in has]


def _cell(
    table: CaseTable, shown: CaseColumn, at: Place, cell: CellCases[int], ends: tuple[float, float]
) -> HeatMapCell:  # fmt: skip
    low, high = ends
    value = shown.number(cell.best) if cell.good else None
    rgb = None if value is None else colour((value - low) / (high - low) if high > low else 1.0)
    bad = [i for i in cell.cases if not table.good[i] and table.states[i] not in ("pending", "running")]
    return {
        "panel": at[0], "row": at[1], "column": at[2], "name": table.names[cell.best],
        "text": short_word(table.states[cell.best]) if value is None else _short(shown.text(cell.best)),
        "fill": "" if rgb is None else "#{:02x}{:02x}{:02x}".format(*rgb),
        "ink": "" if rgb is None else "light" if is_dark(rgb) else "dark",
        "count": len(cell.cases), "bad": len(bad), "about": _about(table, shown, cell),
    }  # fmt: skip


def _short(text: str) -> str:
    """A value for a cell: the unit is in the title."""
    return text.rsplit(" ", 1)[0] if text[-1:].isalpha() and " " in text else text


def _about(table: CaseTable, shown: CaseColumn, cell: CellCases[int]) -> str:
    """What is told of a cell: its best case with its numbers, and what became of the others."""
    best, parts = cell.best, list[str]()
    if cell.good:
        columns = [table.columns[n] for n in (table.rate, table.mfu, table.memory) if n and n != shown.name]
        numbers = [f"{c.label} {c.text(best)}" for c in (shown, *columns) if c.text(best)]
        parts.append(f"{table.names[best]}: {', '.join(numbers)}")
    count = len(cell.cases)
    parts.append(f"{show_whole(count)} case{'s' * (count != 1)}")
    others = [case for case in cell.cases if not table.good[case]]
    states = Counter("void" if table.states[case] == "done" else table.states[case] for case in others)
    parts += [f"{show_whole(n)} {state}" for state, n in states.items()]
    if not cell.good and (why := table.whys[best]):
        parts.append(why)
    return " · ".join(parts)


def _scale(shown: CaseColumn, low: float, high: float) -> list[HeatScale]:
    assert shown.kind is not None
    shares = [i / (_STEPS - 1) for i in range(_STEPS)] if high > low else [1.0]
    return [
        {"fill": "#{:02x}{:02x}{:02x}".format(*colour(s)), "text": shown.kind.show(low + s * (high - low))}
        for s in shares
    ]  # fmt: skip
