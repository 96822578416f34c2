"""The page of a report, in Markdown, from its record alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from penteract.measure.report.accuracy_record import AccuracyRecord
from penteract.measure.report.accuracy_row import QUANTITIES, AccuracyRow, Amounts, Quantity
from penteract.measure.report.error_plot import ErrorPoint, error_plot
from penteract.measure.results.residual import ErrorSummary

_UNIT: dict[Quantity, str] = {"allocated": "GiB", "reserved": "GiB", "device": "GiB", "step": "ms"}
_PLOTTED: tuple[Quantity, ...] = ("step", "allocated")
_QUOTED: tuple[tuple[Quantity, str], ...] = (("allocated", "allocated memory"), ("step", "step time"))
PAGE_BEGINS = "# Accuracy\n\n`penteract report` writes this page."  # by which it is known again
PLOT_TITLES: dict[Quantity, str] = {
    "step": "Error of predicted step times", "allocated": "Error of predicted allocated memory"
}  # fmt: skip
_LONG = 5  # rows from which a table is folded


def accuracy_page(record: AccuracyRecord, stem: str, link: str) -> str:
    """`stem`: of the names of the plots beside the page, such as `accuracy`. `link`: to the record, from the page."""
    same = [row for row in record.rows if row.same_program]
    changed = [row for row in record.rows if not row.same_program]
    parts = [
        PAGE_BEGINS
        + """ Today's planner plans each layout that was measured again; nothing is fitted to
these rows. An error is predicted over measured, less 1. Allocated memory is that of tensors on the fullest rank.
Reserved and device memory are compared where they are predicted. `make test` fails when the error of a row grows.

Where the engine has changed since a row was measured, planner and measurement are of different programs: the rows under
*changed since* show how much faster or leaner the program is thought to be now, too. A row is taken as the same program
if its memory is predicted as it was then.""",
        "## Summary",
        f"**{summary_line(record)}**" if same else "",
        _summaries("Same program", same),
        _summaries("Changed since", changed),
        "\n".join(f"![Errors of {q}]({stem}_{q}.svg)" for q in plots(record)),
        _beyond(record.rows),
        _published(record),
        f"Record: [`{link.rpartition('/')[2]}`]({link})",
        "## Rows" if record.rows else "",
        *(_group(name, rows) for name, rows in record.groups.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_line(record: AccuracyRecord) -> str:
    """The numbers that are quoted elsewhere: of the rows whose program is the one of today."""
    said: list[str] = []
    for quantity, name in _QUOTED:
        if found := ErrorSummary.of(_errors([row for row in record.rows if row.same_program], quantity)):
            digits = 2 if quantity == "allocated" else 1
            said.append(
                f"{name} is off by {100 * found.mean:.{digits}f} % on average and "
                f"{100 * found.worst:.{digits}f} % at worst ({found.n} layouts)"
            )
    return "Predicted " + ", ".join(said)


def plots(record: AccuracyRecord) -> dict[Quantity, str]:
    """The plots, as SVG; filled circles are rows of the same program."""
    found: dict[Quantity, str] = {}
    for quantity in _PLOTTED:
        points = [
            ErrorPoint(getattr(row.measured, quantity), error, f"{row.group}: {row.name}", row.same_program)
            for row in record.rows if (error := row.error(quantity)) is not None
        ]  # fmt: skip
        if points:
            found[quantity] = error_plot(PLOT_TITLES[quantity], _UNIT[quantity], points)
    return found


def _errors(rows: Iterable[AccuracyRow], quantity: Quantity) -> list[float]:
    return [error for row in rows if (error := row.error(quantity)) is not None]


def _summaries(title: str, rows: Sequence[AccuracyRow]) -> str:
    """Of each group and quantity: n, mean, median and worst error."""
    groups = dict.fromkeys(row.group for row in rows)
    lines: list[Sequence[object]] = []
    for group in groups:
        for quantity in QUANTITIES:
            if found := ErrorSummary.of(_errors([row for row in rows if row.group == group], quantity)):
                lines.append((group, quantity, *_shown(found, quantity)))
    if not lines:
        return ""
    return f"### {title}\n\n" + _table(("group", "quantity", "rows", "mean", "median", "worst"), lines)


def _shown(found: ErrorSummary, quantity: Quantity) -> list[object]:
    digits = 1 if quantity == "step" else 2
    return [found.n, *(f"{100 * e:.{digits}f} %" for e in (found.mean, found.median, found.worst))]


def _beyond(rows: Sequence[AccuracyRow]) -> str:
    """What reserved and device memory have beyond the allocated memory predicted, where they are not predicted."""
    lines: list[Sequence[object]] = []
    for group in dict.fromkeys(row.group for row in rows):
        for quantity in ("reserved", "device"):
            more = [
                found - row.predicted.allocated for row in rows if row.group == group and row.predicted.allocated
                and getattr(row.predicted, quantity) is None and (found := getattr(row.measured, quantity))
            ]  # fmt: skip
            if more:
                lines.append(
                    (group, quantity, len(more), *(f"{gib:.2f} GiB" for gib in (min(more), mean(more), max(more))))
                )
    if not lines:
        return ""
    return (
        "### Reserved and device memory, not predicted\n\nMeasured, less the allocated memory that is predicted. Where"
        " one process tried many layouts, its device\nmemory grew from each to the next:\n\n"
    ) + _table(("group", "quantity", "rows", "least", "mean", "most"), lines)


def _published(record: AccuracyRecord) -> str:
    if not record.published:
        return ""
    return (
        "### Published by others\n\nStep times alone: memory is another trainer's. Their pointwise ops are planned"
        " as one kernel each.\n\n"
    ) + _table(("set", "rows", "mean", "median", "worst"),
               [(about, *_shown(found, "step")) for about, found in record.published.items()])  # fmt: skip


def _group(name: str, rows: Sequence[AccuracyRow]) -> str:
    """All rows of a group, folded where they are many."""
    head = ["row"]
    used: list[Quantity] = [q for q in QUANTITIES if any(getattr(row.measured, q) is not None for row in rows)]
    for quantity in used:
        predicted = any(getattr(row.predicted, quantity) is not None for row in rows)
        head += [f"{quantity}, {_UNIT[quantity]}"] + ["predicted", "error"] * predicted
    lines = [
        [row.name + " (changed since)" * (not row.same_program),
         *(cell for q in used for cell in _cells(row, q, rows))]
        for row in rows
    ]  # fmt: skip
    table = _table(head, lines)
    if len(rows) >= _LONG:
        table = f"<details><summary>{len(rows)} rows</summary>\n\n{table}\n\n</details>"
    return f"### {name}\n\n{table}"


def _cells(row: AccuracyRow, quantity: Quantity, rows: Sequence[AccuracyRow]) -> list[str]:
    def shown(amounts: Amounts) -> str:
        found = getattr(amounts, quantity)
        return "" if found is None else f"{found:,.1f}" if quantity == "step" else f"{found:,.3f}"

    cells = [shown(row.measured)]
    if any(getattr(one.predicted, quantity) is not None for one in rows):
        error = row.error(quantity)
        digits = 1 if quantity == "step" else 2
        cells += [shown(row.predicted), "" if error is None else f"{100 * error:+.{digits}f} %"]
    return cells


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *rows)
    )
