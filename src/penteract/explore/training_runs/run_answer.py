"""The answer about runs: what their folders say, formatted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from math import floor, isfinite
from pathlib import Path
from statistics import median
from typing import Any, cast

from penteract.config.files.run_folder import Row
from penteract.errors import PenteractError
from penteract.explore.amounts import difference, nice
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Fact, Tick
from penteract.explore.schemas.runs_schema import (
    RunCheckpoint,
    RunCurve,
    RunError,
    RunLevel,
    RunLine,
    RunsAnswer,
    RunSummary,
)
from penteract.explore.training_runs.read_runs import RunFolder, RunFolders, moment
from penteract.units import GIB, printable, show_bytes, show_step, show_whole

_DRAWN = 6  # runs at once
_POINTS = 240  # of a line
_LONGEST = 400  # letters of a text
_STEADY = 20  # last steps whose median is shown
_LARGEST, _MOST_GIB = 10.0**30, 2.0**40  # what is larger is no measurement
# Fields of metrics.jsonl: their labels, units, and how many digits are shown.
CURVES = (
    ("train/loss", "Loss", "nats a token", 4), ("val/loss", "Validation loss", "nats a token", 4),
    ("train/grad_norm", "Gradient norm", "", 4), ("perf/tokens_per_sec", "Tokens a second", "all ranks", 0),
    ("perf/step_time_s", "Step time", "seconds", 3), ("perf/mfu", "MFU", "of the dense peak", 4),
    ("train/lr", "Learning rate", "", 8),
)  # fmt: skip
_PREDICTED = {"perf/step_time_s": "perf/predicted_step_time_s"}
_ANY = "penteract train --preset tiny"
_GOOD = ("created", "running", "done", "stopped")


def runs_answer(runs: RunFolders, wanted: object) -> RunsAnswer:
    """All runs; the curves of those whose names are `wanted`, or of the newest."""
    try:
        folders = runs.folders()
    except OSError as error:
        return _empty(runs.folder, f"The folder cannot be read: {error.strerror}.")
    if not folders:
        return _empty(runs.folder, "There is no run in this folder yet.")
    names = [run.name for run in folders]
    given = dict.fromkeys(map(str, cast("list[object]", wanted))) if isinstance(wanted, list) else {}
    chosen = [name for name in given if name in names][:_DRAWN] or names[:1]
    rows = dict[str, list[Row]]()
    for run in folders:
        if run.name in chosen:
            try:
                rows[run.name] = runs.metrics(run)
            except OSError:
                rows[run.name] = []
    found = [_summary(run, chosen, rows.get(run.name)) for run in folders]
    first = found[names.index(chosen[0])]
    states = [one["state"] for one in found]
    facts: list[Fact] = [
        {"label": state.capitalize(), "text": show_whole(states.count(state)), "source": "status.json of each run"}
        for state in dict.fromkeys(states)
    ]
    return {
        "version": VERSION, "kind": "runs", "served": True, "folder": _safe(runs.folder.name),
        "command": _command(folders[names.index(chosen[0])]), "number": show_whole(len(found)),
        "verdict": _verdict(first),
        "good": first["good"], "facts": facts, "runs": found,
        "curves": [c for one in CURVES if (c := _curve(one, chosen, rows))["lines"]],
    }  # fmt: skip


def _command(run: RunFolder) -> str:
    """The command that started a run, as people write it; where it is not known, one that starts any."""
    try:
        program, *words = shlex.split((run.commands() or [""])[0])
    except ValueError:
        return _ANY
    name = "penteract" if Path(program).name in ("penteract", "__main__.py") else program
    command = shlex.join([name, *words])
    return _ANY if len(command) > _LONGEST else _safe(command)  # a part of one is another command


def not_served() -> RunsAnswer:
    """The view where no folder was given: what fills it."""
    found = _empty(Path("runs"), "No folder of runs was given.")
    return {**found, "served": False, "command": "penteract explore --runs runs"}


def _empty(folder: Path, why: str) -> RunsAnswer:
    return {
        "version": VERSION, "kind": "runs", "served": True, "folder": _safe(folder.name),
        "command": _ANY, "number": "No runs", "verdict": why, "good": True, "facts": [],
        "runs": [], "curves": [],
    }  # fmt: skip


def _safe(text: object) -> str:
    return printable(str(text), _LONGEST)


def _verdict(run: RunSummary) -> str:
    at = f" at step {run['step']}" if run["step"] else ""
    why = f": {run['errors'][0]['text']}" if run["state"] == "failed" and run["errors"] else ""
    return f"{run['name']} is {run['state']}{at}{why}"


def _summary(run: RunFolder, chosen: Sequence[str], rows: Sequence[Row] | None) -> RunSummary:
    status, drawn = run.status(), run.name in chosen
    state = _safe(status.get("state", "unknown"))
    last: Row = rows[-1] if rows else {}
    predicted, measured = (_bytes(last.get(f"mem/{name}_gib")) for name in ("predicted", "measured"))
    planned, steps = _planned_step(rows), [seconds for _, seconds in _values(rows or (), "perf/step_time_s")]
    took = median(steps[-_STEADY:]) if steps else 0.0
    linked = (run.at / "checkpoints").is_symlink()
    return {
        "name": _safe(run.name), "state": state, "good": state in _GOOD, "since": _since(status.get("since")),
        "step": show_whole(int(last["step"] or 0)) if last else "",
        "command": _safe("; ".join(run.commands())) if drawn else "",
        "chosen": drawn, "colour": chosen.index(run.name) if drawn else -1,
        "predicted": show_bytes(predicted) if predicted else "", "measured": show_bytes(measured) if measured else "",
        "difference": _difference(measured - predicted, predicted) if predicted and measured else "",
        "predicted_step": show_step(planned) if planned else "", "measured_step": show_step(took) if took else "",
        "step_difference": difference(took, planned) if planned and took else "",
        "errors": [_error(row) for row in run.errors()[:20]] if drawn or state == "failed" else [],
        "checkpoints": list(_checkpoints(run)) if drawn else [],
        "note": "Its checkpoints are on another disk: penteract checkpoints lists them." if linked else "",
    }  # fmt: skip


def _planned_step(rows: Sequence[Row] | None) -> float:
    """Seconds that a step was predicted to take; 0: it was not predicted."""
    found = _values(rows or (), _PREDICTED["perf/step_time_s"])
    return found[-1][1] if found and found[-1][1] > 0 else 0.0


def _since(text: object) -> str:
    """A time of a status, to read; any other text as it is."""
    try:
        return moment(datetime.fromisoformat(str(text)).timestamp()) if text else ""
    except (ValueError, OverflowError, OSError):
        return _safe(text)


def _bytes(gib: object) -> int:
    number = _number(gib)
    return round(number * GIB) if number is not None and 0 <= number < _MOST_GIB else 0


def _number(value: object) -> float | None:
    """A finite number; None for anything else that a row may have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST and isfinite(value) else None


def _difference(more: int, of: int) -> str:
    return f"{'−' if more < 0 else '+'}{show_bytes(abs(more))} ({more / of:+.1%})".replace("(-", "(−")


def _error(row: dict[str, Any]) -> RunError:
    fields = {k: _safe(row.get(k, "")) for k in ("where", "found", "allowed", "fix")}
    text = str(PenteractError(_safe(row["code"]), _safe(row["what"]), **fields))
    return {"text": text, "rank": _safe(row["rank"]), "time": _safe(row.get("time", ""))}


def _checkpoints(run: RunFolder) -> list[RunCheckpoint]:
    found = list[RunCheckpoint]()
    for step, at, proven in list(run.checkpoints())[:50]:
        try:
            size = sum(file.lstat().st_size for file in at.iterdir())
            saved = moment(at.stat().st_mtime)
        except OSError:  # it has gone meanwhile
            continue
        found.append({"step": show_whole(step), "saved": saved, "size": show_bytes(size), "proven": proven})
    return found


def _curve(what: tuple[str, str, str, int], chosen: Sequence[str], rows: dict[str, list[Row]]) -> RunCurve:
    """One field of the chosen runs, over each other."""
    name, label, unit, digits = what
    values = {run: _thinned(_values(rows[run], name)) for run in chosen}
    every = [point for some in values.values() for point in some]
    found: RunCurve = {"name": name, "label": label, "unit": unit, "lines": [], "levels": [], "across": [], "up": []}
    if not every:
        return found
    levels = {run: seconds for run in chosen if name in _PREDICTED and (seconds := _planned_step(rows[run]))}
    heights = [*(y for _, y in every), *levels.values()]
    last, low, high = max(x for x, _ in every), min(heights), max(heights)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    first = min(x for x, _ in every)
    wide = max(1, last - first)
    found["across"] = _ticks(first, first + wide, 0)
    found["up"] = _ticks(low, high, digits)
    for colour, run in enumerate(chosen):
        points = [share for x, y in values[run] for share in ((x - first) / wide, (y - low) / (high - low))]
        texts = [f"{_safe(run)}, step {show_whole(x)}: {show_whole(y, digits)} {unit}".rstrip() for x, y in values[run]]
        line: RunLine = {"run": _safe(run), "colour": colour, "points": points, "texts": texts}
        found["lines"] += [line] if texts else []
        if texts and run in levels:
            at = (levels[run] - low) / (high - low)
            text = f"{_safe(run)}, predicted: {show_whole(levels[run], digits)} {unit}"
            planned: RunLevel = {"run": _safe(run), "colour": colour, "at": at, "text": text}
            found["levels"].append(planned)
    return found


def _values(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """(step, value) of each row that has a finite one."""
    found = list[tuple[int, float]]()
    for row in rows:
        step, value = row["step"], _number(row.get(name))
        if isinstance(step, int) and value is not None:
            found.append((step, value))
    return found


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `_POINTS`: the last of each part, so that the newest is always there."""
    if len(points) <= _POINTS:
        return list(points)
    return [points[(i + 1) * len(points) // _POINTS - 1] for i in range(_POINTS)]


def _ticks(low: float, high: float, digits: int) -> list[Tick]:
    """Marks of an axis from `low` to `high`, as shares of it."""
    step = max(nice(high - low), 1.0 if digits == 0 else 0.0)
    marks = [n * step for n in range(floor(low / step) + (low % step > 0), floor(high / step) + 1)]
    return [{"at": (mark - low) / (high - low), "text": f"{mark:g}"} for mark in marks]
