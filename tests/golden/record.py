"""A golden file: an answer of the planner as JSON for people, and its comparison with another."""

from __future__ import annotations

import json
from difflib import unified_diff
from pathlib import Path
from typing import Any

from golden.questions import LAYOUTS, PLANS, Question
from penteract.planner.ask import as_settings
from penteract.planner.plan import Plan
from penteract.planner.report.as_json import utilisation
from penteract.planner.search.best import Timed
from penteract.units import gib

HERE = Path(__file__).parent
DIGITS = 7  # kept of what is not a count, so that rounding stays below the tolerance
TOLERANCE = 1e-6  # relative; what another machine's libm may differ by is far below

Record = dict[str, Any]


def paths() -> dict[Path, Question]:
    """Each golden file and what it answers."""
    tables = {"layouts": LAYOUTS, "plans": PLANS}
    return {HERE / folder / f"{name}.json": asked for folder, table in tables.items() for name, asked in table.items()}


def record(question: Question) -> Record:
    """What the program answers now."""
    found = question.ask()
    told = of_layout(found) if question.layout else of_plan(found)
    return {"command": question.command, **told}


def of_layout(found: Plan) -> Record:
    """Memory in bytes, time in seconds, of the one layout that was asked for."""
    timed = found.best
    estimate, time, used = timed.estimate, timed.time, utilisation(found, timed)
    parts = {part: rounded(seconds) for part, seconds in time.parts.items()}
    return {
        "layout": as_settings(timed.layout),
        "gradient_accumulation_steps": timed.layout.gradient_accumulation_steps,
        "fits": found.fits(estimate),
        "allocated_gib": round(gib(estimate.allocated), 2),
        "memory": {**estimate.memory, "allocated": estimate.allocated},
        "allocated_by_pipeline_rank": list(estimate.by_pp_rank),
        "step": rounded(time.seconds),
        "step_at_least": rounded(estimate.at_least),
        "step_parts": {part: seconds for part, seconds in parts.items() if seconds},
        "limited_by": time.limited_by,
        "tokens_per_s_per_gpu": rounded(found.rate(timed)),
        **{name: rounded(getattr(used, name) or 0.0) for name in ("mfu", "mfu_causal", "hfu")},
    }


def of_plan(found: Plan) -> Record:
    """How many layouts there are, why those that are refused are, and the best."""
    counts = found.counts
    return {
        "enumerated": counts.enumerated,
        "refused": dict(counts.refused),
        "fit": counts.fit,
        "best": [_row(found, timed) for timed in found.layouts],
    }


def _row(found: Plan, timed: Timed) -> Record:
    return {
        "layout": found.ask.text(timed.layout),
        "allocated": timed.estimate.allocated,
        "allocated_gib": round(gib(timed.estimate.allocated), 2),
        "tokens_per_s_per_gpu": rounded(found.rate(timed)),
        "limited_by": timed.time.limited_by,
    }


def rounded(x: float) -> float:
    """To `DIGITS` digits; what a subtraction leaves of nothing is nothing."""
    return 0.0 if abs(x) < 1e-9 else float(f"{x:.{DIGITS}g}")


def settled(stored: Any, now: Any) -> Any:
    """`now`, with the stored number wherever the two are within the tolerance: what is left to differ is a change."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return {key: settled(stored.get(key), value) for key, value in now.items()}
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        return [settled(a, b) for a, b in zip(stored, now, strict=True)]
    if isinstance(stored, float) and isinstance(now, float) and abs(now - stored) <= TOLERANCE * abs(stored):
        return stored
    return now


def text(told: Record) -> str:
    """As the file has it."""
    return json.dumps(told, indent=2) + "\n"


def difference(path: Path, now: Record) -> str:
    """What a change did to a file, line by line; empty: nothing."""
    before = path.read_text(encoding="utf-8") if path.exists() else "{}\n"
    after = text(settled(json.loads(before), now))
    name = path.relative_to(HERE).as_posix()
    return "".join(unified_diff(before.splitlines(True), after.splitlines(True), f"{name} before", f"{name} now", n=2))
