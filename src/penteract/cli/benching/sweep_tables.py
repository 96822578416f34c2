"""The tables of `penteract bench`: cases before they run, how far they are, and what was measured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from penteract.config.device_words import device_word
from penteract.config.rules.kernel_packages import needs_packages, packages_needed
from penteract.measure.bench.cases.case_cost import gpu_seconds, start_seconds
from penteract.measure.bench.cases.sweep_cases import Expanded
from penteract.measure.results.ranking import CLOSE, FIRST, PlanVerdict, RankedCase
from penteract.measure.schemas.sweep import CaseStatus, Sweep, SweepCase, SweepSettings
from penteract.units import show_bytes, show_seconds, show_step, show_whole

_WIDEST = 400  # columns
_TIED = "="
_STATES = ("done", "running", "pending", "failed", "out of memory", "timed out", "lost", "skipped")


def show(*parts: Table | str) -> None:
    """Print tables and lines; where there is no terminal, a line stays a line."""
    width = None if sys.stdout.isatty() else _WIDEST
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    for part in parts:
        console.print(part)


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines, of each column's name and side, and of rows. A column in which nothing stands is left
    out."""
    table = Table(box=None, pad_edge=False)
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    for name, side in (columns[i] for i in kept):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=name not in ("why", ""))
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


# ---- before ----------------------------------------------------------------------------------------------------------


def planned(cases: Expanded, settings: SweepSettings) -> Iterator[Table | str]:
    """The cases of a sweep that has not begun, and what they are predicted to cost."""
    yield _cases([one.case for one in cases.cases], settings)
    yield from (f"not a case: {name}: {why}" for name, why in cases.refused)
    yield from packages_line(cases)
    yield _cost([one.case for one in cases.cases if one.case.predicted.fits is not False], settings)


def _cases(cases: Sequence[SweepCase], settings: SweepSettings) -> Table:
    """A row for each case, with what it is predicted to take."""
    one = device(settings)
    columns = (("#", "right"), ("case", ""), ("layout", ""), (device_word(2, on_cpus=settings.on_cpus), "right"),
               ("memory", "right"), ("step", "right"), (f"{one}-min", "right"), ("", ""))  # fmt: skip
    rows = list[tuple[str, ...]]()
    for case in cases:
        skipped = case.predicted.fits is False
        why = f"skipped: {show_bytes(case.predicted.usable_bytes or 0)} usable" if skipped else ""
        cost = "" if skipped else f"{gpu_seconds(case, settings) / 60:.1f}"
        step = "" if case.predicted.step_s is None else show_step(case.predicted.step_s)
        memory = show_bytes(case.predicted.allocated_bytes)
        rows.append((str(case.number), case.name, case.layout_text, str(case.ranks), memory, step, cost, why))
    return _table(columns, rows)


def device(settings: SweepSettings) -> str:
    """What a rank of the sweep has, in words: a GPU, or as a process a part of a CPU."""
    return device_word(on_cpus=settings.on_cpus)


def packages_line(cases: Expanded) -> tuple[str, ...]:
    """What the kernels of cases need in addition to torch, as `plan` says it: a line, or none."""
    runs = (one.run.run for one in cases.cases if one.case.predicted.fits is not False)
    return needs_packages({name for run in runs for name in packages_needed(run.model, run.layout)})


def _cases_in_words(n: int) -> str:
    return f"{n} {'case' if n == 1 else 'cases'}"


def _cost(runs: Sequence[SweepCase], settings: SweepSettings) -> str:
    """What these cases are predicted to cost: their starts, an estimate, and the steps of those with a predicted
    time."""
    if not runs:
        return f"{_cases_in_words(0)} to run"
    minutes = f"{sum(gpu_seconds(case, settings) for case in runs) / 60:.1f} {device(settings)}-minutes"
    budget = "" if settings.budget_gpu_minutes is None else f" of a budget of {settings.budget_gpu_minutes:g}"
    start = start_seconds(settings)
    predicted = all(case.predicted.step_s is not None for case in runs)
    starts = (
        f"with {start:.0f} s a start" if predicted else f"for starts alone, {start:.0f} s each: steps are not predicted"
    )
    steps = f"{settings.warmup} + {settings.steps} steps each"
    return f"{_cases_in_words(len(runs))} to run, {steps}: about {minutes}{budget}, {starts}"


# ---- meanwhile -------------------------------------------------------------------------------------------------------


def counts(sweep: Sweep) -> str:
    """How many cases are in each state, and what they have cost."""
    found = Counter(row.status.state for row in sweep.rows)
    states = ", ".join(f"{found[state]} {state}" for state in _STATES if found[state])
    spent = sum(row.status.gpu_seconds for row in sweep.rows) / 60
    minutes = f"{spent:.1f} {device(sweep.settings)}-minutes"
    return f"{sweep.settings.name}: {_cases_in_words(len(sweep.rows))}: {states} · {minutes}"


def state(status: CaseStatus) -> str:
    """A case's state in a few words, with the attempt if it is not the first."""
    more = " once, to be tried again" if status.state == "lost" and not status.over else ""
    return f"{status.state}{more}"


def why(status: CaseStatus) -> str:
    """Why a case did not end well; empty if it did or has not ended."""
    error = status.error
    if not error:
        return ""
    found, allowed = error.get("found"), error.get("allowed")
    more = " / ".join(filter(None, (f"found {found}" if found else "", f"allowed {allowed}" if allowed else "")))
    return " · ".join(filter(None, (str(error.get("what", "")), more)))


def progress(sweep: Sweep, most: int | None = None) -> Table:
    """How far each case is. `most`: rows; then those that run come first, and the last that ended."""
    rows = list(sweep.rows)
    if most is not None and len(rows) > most:
        order = {"running": 0, "pending": 2}
        rows = sorted(rows, key=lambda row: row.status.since, reverse=True)  # the last that changed first
        rows = sorted(rows, key=lambda row: order.get(row.status.state, 1))[: max(1, most)]
        rows = sorted(rows, key=lambda row: row.case.number)
    speeds = f"tok/s/{device(sweep.settings)}"
    columns = (("case", ""), ("state", ""), (speeds, "right"), ("step", "right"), ("why", ""))
    shown = list[tuple[str, ...]]()
    for row in rows:
        measured = row.result.measured if row.result else None
        speed = show_whole(measured.tokens_per_s_per_gpu) if measured else ""
        step = show_step(measured.step_s) if measured else ""
        note = why(row.status) or (f"void: {measured.void}" if measured and measured.void else "")
        shown.append((row.case.name, state(row.status), speed, step, note))
    return _table(columns, shown)


def unfinished(sweep: Sweep) -> Iterator[Table | str]:
    """How far a sweep is, and what is left of it, with what that is predicted to cost."""
    rest = [row.case for row in sweep.rows if not row.status.over]
    yield counts(sweep)
    if rest:
        yield _cases(rest, sweep.settings)
    yield _cost(rest, sweep.settings)


# ---- after -----------------------------------------------------------------------------------------------------------


def ranked(sweep: Sweep, rows: Sequence[RankedCase]) -> Iterator[Table | str]:
    """The measured cases, the fastest first, beside what was predicted; then those without a speed."""
    speeds = f"tok/s/{device(sweep.settings)}"
    columns = (
        ("#", "right"), ("case", ""), ("layout", ""), (speeds, "right"), ("MFU", "right"), ("step", "right"),
        ("spread", "right"), ("plan's #", "right"), ("planned", "right"), ("error", "right"),
        ("memory", "right"), ("planned", "right"), ("error", "right"), ("", ""),
    )  # fmt: skip
    of_name, shown = {row.case.name: row for row in sweep.rows}, list[tuple[str, ...]]()
    for r in rows:
        row = of_name[r.case.name]
        assert row.result is not None
        measured, predicted = row.result.measured, row.case.predicted
        shown.append((
            _number(r), row.case.name, row.case.layout_text,
            show_whole(measured.tokens_per_s_per_gpu), "" if measured.mfu is None else f"{measured.mfu:.1%}",
            show_step(measured.step_s), f"{measured.spread:.1%}",
            str(r.planned or ""), "" if predicted.step_s is None else show_step(predicted.step_s),
            _percent(r.time_error), show_bytes(max(measured.allocated_bytes, default=0)),
            show_bytes(predicted.allocated_bytes), _percent(r.memory_error, 2),
            _note(r, loss_falls=measured.loss_falls),
        ))  # fmt: skip
    if rows:
        yield _table(columns, shown)
    if any(r.tied != r.place for r in rows):
        yield f"A number with {_TIED} is slower than the case of that number by less than their spread: that is noise"
    for row in sweep.rows:
        if not row.counts:
            void = row.result.measured.void if row.result else ""
            yield f"{row.case.name}: {f'void: {void}' if void else state(row.status)}" + _after(why(row.status))


def _number(r: RankedCase) -> str:
    if r.vague:
        return ""
    return str(r.place) if r.tied == r.place else f"{r.tied}{_TIED}"


def _after(text: str) -> str:
    return f": {text}" if text else ""


def _note(r: RankedCase, *, loss_falls: bool) -> str:
    notes = ["too few steps to rank"] * r.vague + ["the loss does not fall"] * (not loss_falls)
    return ", ".join((["the plan was wrong"] if r.right is False else []) + notes)


def _percent(error: float | None, digits: int = 1) -> str:
    return "" if error is None else f"{error:+.{digits}%}"


def about_plan(found: PlanVerdict | None) -> Iterator[str]:
    """What the sweep says of the plan."""
    if found is None:
        return
    if found.memory:
        yield f"Memory: {found.memory[0]:.2%} mean error, {found.memory[1]:.2%} worst, of bytes allocated"
    if found.time and found.regret is not None:
        yield (f"Step time: {found.time[0]:.1%} mean error, {found.time[1]:.1%} worst; {found.right} of "
               f"{found.predicted} cases right, within {CLOSE:.0%} or their spread")  # fmt: skip
        among = "is" if found.best_in_first else "is not"
        regret = f"reaches {1 - found.regret:.1%} of the best, {found.best}: a regret of {found.regret:.1%}"
        yield f"Of the cases with a speed, the plan's first, {found.first}, {regret}"
        yield f"The best, or a case within noise of it, {among} among the plan's first {FIRST}"


def left(sweep: Sweep, seconds: float, before: int) -> str:
    """About how long a sweep takes to its end, from the cases that ended in these seconds: all but the `before` that
    were over then. Empty if none did."""
    ended = sum(row.status.over for row in sweep.rows) - before
    rest = sum(not row.status.over for row in sweep.rows)
    return f"about {show_seconds(seconds / ended * rest)} left" if ended > 0 and rest else ""
