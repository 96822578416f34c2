"""The answer of the Bench view: a sweep of the folder, or a file that the reader has, as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from penteract.errors import PenteractError
from penteract.explore.measured_sweeps.bench_options import checked, settled
from penteract.explore.measured_sweeps.beside_plan import ranked, ranking
from penteract.explore.measured_sweeps.case_points import case_points
from penteract.explore.measured_sweeps.case_rows import case_rows
from penteract.explore.measured_sweeps.case_table import CaseColumn, CaseTable
from penteract.explore.measured_sweeps.heat_maps import heat_maps
from penteract.explore.measured_sweeps.read_sweeps import FoundSweep, SweepFolders
from penteract.explore.measured_sweeps.residuals import residuals
from penteract.explore.measured_sweeps.table_file import read_table, table_of_sweep
from penteract.explore.schemas.bench_schema import (
    BenchAnswer,
    BenchChoice,
    BenchField,
    BenchOptions,
    StateCount,
    SweepSummary,
    UnfinishedCase,
)
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Fact
from penteract.measure.results.ranking import RankedCase, verdict
from penteract.units import printable, show_whole

_CHOICES = 24  # values of a field that can be filtered
_UNFINISHED = 60
_MAKES = "penteract bench tiny --grid parallel.tp=1/2 --ranks 2"
STATES: Mapping[str, str] = {
    "done": "It ran all of its steps.", "void": "It ran, and its speed counts for nothing: the loss is not finite.",
    "running": "It runs now.", "pending": "It has not begun.", "failed": "It ended with an error.",
    "out of memory": "Tensors, or a library, found no memory.", "timed out": "It took longer than its limit.",
    "lost": "Its node or its job was lost, twice.", "skipped": "It was predicted not to fit, and was not run.",
}  # fmt: skip


def bench_answer(sweeps: SweepFolders | None, given: object) -> BenchAnswer:
    """The figures that are asked for. Raises BadInput for options that are none, and for a file that is no table."""
    asked = checked(given)
    if file := asked.get("file"):
        if "text" not in file:
            name = printable(file["name"], 80)
            why = f"The link names {name}, and has not its content: drop the file anywhere on the page."
            return _empty(asked, why, "penteract explore", [], served=sweeps is not None)
        return _filled(read_table(file["name"], file["text"]), asked, [], served=False)
    if sweeps is None:
        return _empty(asked, "No folder of sweeps was given, and no file.", "penteract explore --sweeps sweeps", [],
                      served=False)  # fmt: skip
    try:
        found = sweeps.sweeps()
    except OSError as error:
        return _empty(asked, f"The folder cannot be read: {error.strerror}.", _MAKES, [])
    if not found:
        return _empty(asked, "There is no sweep in this folder yet.", _MAKES, [])
    chosen = next((one for one in found if one.name == asked.get("sweep")), found[0])
    listed = _listed(found, chosen)
    try:
        sweep, notes = sweeps.read(chosen)
    except PenteractError as error:
        return _empty(asked, f"The sweep cannot be read: {error.what}.", _MAKES, listed)
    if not sweep.rows:
        return _empty(asked, "; ".join(("No case of it can be read", *notes[:3])), _MAKES, listed)
    return _filled(table_of_sweep(sweep, notes), asked | {"sweep": chosen.name}, listed, served=sweeps.dated)


def _listed(found: Sequence[FoundSweep], chosen: FoundSweep | None) -> list[SweepSummary]:
    texts = [" · ".join(filter(None, (f"{show_whole(one.cases)} cases", one.changed))) for one in found]
    return [{"name": one.name, "chosen": one is chosen, "text": text} for one, text in zip(found, texts, strict=True)]


def _empty(
    asked: BenchOptions, why: str, command: str, sweeps: list[SweepSummary], *, served: bool = True
) -> BenchAnswer:  # fmt: skip
    said = printable(why, 400)
    return {
        "version": VERSION, "kind": "bench", "served": served, "command": command, "empty": said, "title": "Sweeps",
        "what": "Sweeps", "sweeps": sweeps, "number": "No cases", "verdict": said, "good": True, "facts": [],
        "headline": command, "notes": [], "options": asked, "fields": [], "states": [], "unfinished": [],
        "heat": None, "points": None, "table": None, "ranking": None, "residuals": None,
    }  # fmt: skip


def _filled(table: CaseTable, asked: BenchOptions, sweeps: list[SweepSummary], *, served: bool) -> BenchAnswer:
    options = settled(table, asked)
    cases = kept(table, options)
    order = ranked(table, cases)
    across, up = (table.columns.get(options.get(name, "")) for name in ("across", "up"))
    number, verdict_text, good = _verdict(table, order, cases)
    command = printable(table.command, 400) or "penteract explore"
    found: BenchAnswer = {
        "version": VERSION, "kind": "bench", "served": served, "command": command, "empty": "", "title": table.title,
        "what": _what(table, order), "sweeps": sweeps, "number": number, "verdict": verdict_text, "good": good,
        "facts": _facts(table, order, cases), "headline": _headline(table, cases), "notes": list(table.notes[:5]),
        "options": options, "fields": [_field(column) for column in table.columns.values()],
        "states": _states(table, cases), "unfinished": _unfinished(table, cases),
        "heat": heat_maps(table, cases, options),
        "points": case_points(table, cases, across, up) if across and up else None,
        "table": case_rows(table, cases, options), "ranking": ranking(table, order),
        "residuals": residuals(table, cases, options),
    }  # fmt: skip
    if "file" in options:
        found["options"] = cast("BenchOptions", {**options, "file": {"name": options["file"]["name"]}})
    return found


def kept(table: CaseTable, options: BenchOptions) -> list[int]:
    """The numbers of the cases that the filters leave."""
    only = [(table.columns[name], {*texts}) for name, texts in options.get("only", {}).items()]
    found = [i for i in range(len(table.names)) if all(column.text(i) in texts for column, texts in only)]
    if letters := options.get("find", "").strip().lower():
        columns = table.columns.values()
        found = [
            i for i in found
            if letters in table.names[i].lower() or any(letters in column.text(i).lower() for column in columns)
        ]  # fmt: skip
    return found


def _field(column: CaseColumn) -> BenchField:
    is_choice = column.grid or column.name in ("state", "status")
    some = column.distinct if is_choice and len(column.distinct) <= _CHOICES else []
    counts = Counter(column.values) if some else Counter[float | str | None]()
    at = {value: i for i, value in enumerate(column.values)} if some else {}
    choices: list[BenchChoice] = [{"text": column.text(at[v]), "count": show_whole(counts[v])} for v in some]
    return {
        "name": column.name, "label": column.label, "unit": column.unit, "source": column.source,
        "number": column.kind is not None, "grid": column.grid, "choices": choices if len(choices) > 1 else [],
    }  # fmt: skip


def _state_of(table: CaseTable, case: int) -> str:
    return "void" if table.states[case] == "done" and not table.good[case] else table.states[case]


def _states(table: CaseTable, cases: Sequence[int]) -> list[StateCount]:
    counts = Counter(_state_of(table, i) for i in cases)
    order = [*(state for state in STATES if state in counts), *(state for state in counts if state not in STATES)]
    return [
        {"state": printable(state, 40), "count": show_whole(counts[state]), "share": counts[state] / len(cases),
         "about": STATES.get(state, "As the file says.")}
        for state in order
    ]  # fmt: skip


def _unfinished(table: CaseTable, cases: Sequence[int]) -> list[UnfinishedCase]:
    found: list[UnfinishedCase] = [
        {"name": table.names[i], "state": _state_of(table, i), "why": table.whys[i]}
        for i in cases if not table.good[i] and table.states[i] not in ("pending", "running") and table.whys[i]
    ]  # fmt: skip
    return found[:_UNFINISHED]


def _what(table: CaseTable, order: Sequence[RankedCase]) -> str:
    """What the number of the headline is."""
    return f"{table.columns[table.rate].label} of the best case" if order else "Cases"


def _verdict(table: CaseTable, order: Sequence[RankedCase], cases: Sequence[int]) -> tuple[str, str, bool]:
    """The number of the headline, what it says, and whether the plan was good."""
    if not order:
        return show_whole(len(cases)), f"cases in {table.title}; no speed counts", True
    best, found = order[0], verdict(order)
    number = table.columns[table.rate].text(int(best.case.name))
    name = table.names[int(best.case.name)]
    if found is None or found.best_in_first is None:
        return number, f"{name}: the fastest of {show_whole(len(order))} cases with a speed", True
    among = "is" if found.best_in_first else "is not"
    regret = f"taking its first costs {found.regret:.1%}" if found.regret else "its first is the best"
    return number, f"{name}: the measured best {among} among the plan's first three; {regret}", found.best_in_first


def _facts(table: CaseTable, order: Sequence[RankedCase], cases: Sequence[int]) -> list[Fact]:
    source = "measured" if table.own else "as the file says"
    found: list[Fact] = [{"label": "Cases", "text": show_whole(len(cases)), "source": "with the filters"}]
    good = sum(table.good[i] for i in cases)
    found.append({"label": "With a speed", "text": show_whole(good), "source": source})
    if order:
        at = int(order[0].case.name)
        for label, name in (("MFU of the best", table.mfu), ("Its memory", table.memory), ("Its step", table.step)):
            if name and table.columns[name].text(at):
                found.append({"label": label, "text": table.columns[name].text(at), "source": source})
    if (said := verdict(order)) and said.time:
        found.append({"label": "Time error", "text": f"{said.time[0]:.1%}", "source": "mean; predicted and measured"})
    if said and said.memory:
        found.append(
            {"label": "Memory error", "text": f"{said.memory[0]:.2%}", "source": "mean; predicted and measured"}
        )
    return found


def _headline(table: CaseTable, cases: Sequence[int]) -> str:
    """What the cases are of: models and devices."""
    names = ("model", "model_label", "device", "precision")
    some = {n: [*dict.fromkeys(table.columns[n].text(i) for i in cases)] for n in names if n in table.columns}
    parts = [", ".join(filter(None, texts[:4])) + (", …" if len(texts) > 4 else "") for texts in some.values()]
    return " · ".join(filter(None, (table.title, *parts, f"{show_whole(len(cases))} cases")))
