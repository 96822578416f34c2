"""Where predictions are off: measured less predicted, over measured, case by case and by the values of a field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from penteract.explore.measured_sweeps.bench_options import pairs
from penteract.explore.measured_sweeps.beside_plan import signed
from penteract.explore.measured_sweeps.case_points import case_points
from penteract.explore.measured_sweeps.case_table import CaseColumn, CaseTable
from penteract.explore.schemas.bench_schema import BenchOptions, BenchResiduals, ResidualGroup
from penteract.measure.results.residual import ErrorSummary, residual
from penteract.units import show_whole

_GROUPS = 24
_SMALL = 1e-9  # of a sum of squares: nothing to explain


def residuals(table: CaseTable, cases: Sequence[int], options: BenchOptions) -> BenchResiduals | None:
    """The residuals of the chosen pair of numbers; None where no case has both."""
    predicted = table.columns.get(options.get("predicted", ""))
    measured = table.columns.get(options.get("measured", ""))
    if predicted is None or measured is None:
        return None
    errors = _errors(table, cases, predicted, measured)
    points = case_points(table, [*errors], predicted, measured, equal=True) if errors else None
    if points is None:
        return None
    group = _group(table, errors, options.get("group", ""))
    groups = _groups(table, errors, group) if group else []
    label = measured.label
    return {
        "label": label, "predicted": predicted.name, "measured": measured.name,
        "pairs": [[p, m, table.columns[m].label] for p, m in pairs(table).items()], "points": points,
        "group": group.name if group else "",
        "group_label": group.label if group else "", "groups": groups, "about": _about(table, errors, group, label),
    }  # fmt: skip


def _errors(
    table: CaseTable, cases: Sequence[int], predicted: CaseColumn, measured: CaseColumn
) -> Mapping[int, float]:  # fmt: skip
    """Of each case that is done and has both numbers its residual. A void speed counts for nothing; its memory does."""
    assert predicted.kind is not None and measured.kind is not None
    found, rates = dict[int, float](), ("seconds", "rate", "share")
    for i in cases:
        one, other = measured.number(i), predicted.number(i)
        if one is None or other is None or table.states[i] != "done":
            continue
        if measured.kind.of in rates and not table.good[i]:
            continue
        error = residual(one * measured.kind.base, other * predicted.kind.base)
        if error is not None:
            found[i] = error
    return found


def _group(table: CaseTable, errors: Mapping[int, float], asked: str) -> CaseColumn | None:
    """The field to group by: the one that is asked for, or else the one that explains most."""
    some = {c.name: c for c in table.columns.values() if c.grid and len({c.text(i) for i in errors}) > 1}
    if asked in some:
        return some[asked]
    return max(some.values(), key=lambda column: explained(column, errors), default=None)


def explained(column: CaseColumn, errors: Mapping[int, float]) -> float:
    """The share of the residuals' variance that a field explains, less what as many values would by chance (adjusted
    R²)."""
    mean, by = fmean(errors.values()), dict[str, list[float]]()
    for i, error in errors.items():
        by.setdefault(column.text(i), []).append(error)
    whole = sum((error - mean) ** 2 for error in errors.values())
    rest = sum(sum((error - fmean(some)) ** 2 for error in some) for some in by.values())
    free = len(errors) - len(by)
    return 1 - (rest / free) / (whole / (len(errors) - 1)) if free > 0 and whole > _SMALL else -1.0


def _groups(table: CaseTable, errors: Mapping[int, float], column: CaseColumn) -> list[ResidualGroup]:
    """The cases by the value of a field, in its order."""
    by = dict[float | str, list[int]]()
    for i in errors:
        if (value := column.values[i]) is not None:
            by.setdefault(value, []).append(i)
    ordered = [(value, by[value]) for value in column.distinct if value in by][:_GROUPS]
    means = {value: fmean(errors[i] for i in some) for value, some in ordered}
    most = max((abs(mean) for mean in means.values()), default=0.0) or 1.0
    return [_one(table, errors, column, some, means[value] / most) for value, some in ordered]


def _one(
    table: CaseTable, errors: Mapping[int, float], column: CaseColumn, cases: Sequence[int], size: float
) -> ResidualGroup:  # fmt: skip
    found = ErrorSummary.of(errors[i] for i in cases)
    assert found is not None
    worst = max(cases, key=lambda i: abs(errors[i]))
    return {
        "text": column.text(cases[0]), "count": show_whole(found.n), "mean": signed(fmean(errors[i] for i in cases), 2),
        "size": size, "absolute": f"{found.mean:.2%}", "worst": signed(errors[worst], 2),
        "worst_case": table.names[worst],
    }  # fmt: skip


def _about(table: CaseTable, errors: Mapping[int, float], group: CaseColumn | None, label: str) -> list[str]:
    found = ErrorSummary.of(errors.values())
    assert found is not None
    worst = max(errors, key=lambda i: abs(errors[i]))
    of = f"{show_whole(found.n)} case{'s' * (found.n != 1)}"
    lines = [f"{label}, {of}: {found.mean:.2%} mean error, {found.median:.2%} median, {found.worst:.2%} worst "
             f"({table.names[worst]})."]  # fmt: skip
    share = explained(group, errors) if group else -1.0
    if group and share > 0.1:
        lines.append(f"{group.label} explains {share:.0%} of the variance of the residuals.")
    return lines
