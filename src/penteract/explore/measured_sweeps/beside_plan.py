"""The measured order of cases beside the plan's, and what it says of the plan: by the formulas of `bench show`."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.explore.measured_sweeps.case_table import CaseTable
from penteract.explore.schemas.bench_schema import BenchRanking, RankingRow
from penteract.measure.results.ranking import CLOSE, FIRST, PlanVerdict, RankedCase, rank, verdict
from penteract.units import show_step, show_whole

_ROWS = 50  # of the ranking that are shown
_SIGN = str.maketrans("-", "−")


def ranked(table: CaseTable, cases: Sequence[int]) -> list[RankedCase]:
    """The cases that count and have a speed, the fastest first. Their names are numbers of the table's cases."""
    if not table.rate:
        return []
    return rank(table.numbers(i) for i in cases if table.good[i] and table.value(table.rate, i))


def ranking(table: CaseTable, rows: Sequence[RankedCase]) -> BenchRanking | None:
    """The ranking; None where no speed counts."""
    if not rows:
        return None
    shown = list(rows[:_ROWS])
    shown += [row for row in rows[_ROWS:] if row.planned is not None and row.planned <= FIRST]
    found = f"{show_whole(len(rows))} cases with a speed"
    more = f", of which the first {show_whole(len(shown))} are shown" if len(shown) < len(rows) else ""
    best = max(rows[0].case.rate, *(row.case.predicted_rate or 0.0 for row in shown), 1e-30)
    return {"rows": [_row(table, row, best) for row in shown], "found": found + more, "about": about(table, rows)}


def _row(table: CaseTable, row: RankedCase, best: float) -> RankingRow:
    case, rate = row.case, table.columns[table.rate].kind
    assert rate is not None
    at = int(case.name)
    layout = table.columns["layout"].text(at) if "layout" in table.columns else ""
    planned = case.predicted_rate
    return {
        "place": "?" if row.vague else str(row.place),
        "planned": "" if row.planned is None else str(row.planned), "name": table.names[at], "layout": layout,
        "speed": rate.show(case.rate), "planned_speed": rate.show(planned) if planned else "",
        "rate": case.rate / best, "planned_rate": planned / best if planned else -1.0,
        "step": "" if case.step_s is None else table.columns[table.step].text(at),
        "planned_step": "" if case.predicted_step_s is None else show_step(case.predicted_step_s),
        "time_error": signed(row.time_error), "memory_error": signed(row.memory_error, 2),
        "right": "" if row.right is None else "right" if row.right else "wrong",
    }  # fmt: skip


def signed(error: float | None, digits: int = 1) -> str:
    """A residual, to read; empty: not known."""
    return "" if error is None else f"{error:+.{digits}%}".translate(_SIGN)


def about(table: CaseTable, rows: Sequence[RankedCase]) -> list[str]:
    """What the ranking says of the plan, in sentences."""
    found = verdict(rows)
    if found is None or not found.predicted:
        return ["No speed was predicted, so there is no plan's order beside this one."]
    vague = ["A case with a ? has too few steps to rank: they differ too much."] * any(row.vague for row in rows)
    return [*vague, *_of_order(table, found, rows), *_of_errors(found)]


def _of_order(table: CaseTable, found: PlanVerdict, rows: Sequence[RankedCase]) -> list[str]:
    best, first = (table.names[int(name)] for name in (found.best, found.first))
    place = rows[0].planned
    is_in = "is" if found.best_in_first else "is not"
    within = f"The measured best, or a case within noise of it, {is_in} among the plan's first {FIRST}."
    at = f"The measured best, {best}, is number {place} of the plan's {found.predicted}." if place else ""
    regret = (
        "The plan's first is the measured best." if found.first == found.best else
        f"The plan's first, {first}, reaches {1 - (found.regret or 0.0):.1%} of it: a regret of {found.regret:.1%}."
    )  # fmt: skip
    return [*filter(None, (at,)), within, regret]


def _of_errors(found: PlanVerdict) -> list[str]:
    lines = list[str]()
    if found.time:
        lines.append(f"Step time: {found.time[0]:.1%} mean error, {found.time[1]:.1%} worst; {found.right} of "
                     f"{found.predicted} cases right, within {CLOSE:.0%} or their spread.")  # fmt: skip
    if found.memory:
        lines.append(f"Memory allocated: {found.memory[0]:.2%} mean error, {found.memory[1]:.2%} worst.")
    return lines
