"""A sweep's folder run by `penteract bench`: its progress, its results, and what is left."""

from __future__ import annotations

import json as to_json
import sys
from dataclasses import asdict
from typing import Any

from penteract.cli.benching.slurm_jobs import slurm_launcher
from penteract.cli.benching.sweep_progress import StopRequests, SweepProgress
from penteract.cli.benching.sweep_tables import about_plan, counts, device, ranked, show
from penteract.cli.resolve.planning.progress_line import on_a_terminal
from penteract.cli.torch_modules import torch_module
from penteract.errors import Preempted
from penteract.measure.bench.launcher import Launcher
from penteract.measure.bench.local_launcher import LocalLauncher
from penteract.measure.bench.sweep_run import SweepRun
from penteract.measure.results.ranking import numbers_of, rank, verdict
from penteract.measure.schemas.sweep import Sweep
from penteract.measure.schemas.sweep_folder import SweepFolder


def run_folder(folder: SweepFolder, *, json: bool, tell: bool = True) -> int:
    """Run what is not over, by the sweep's launcher; returns the exit code. With `json`, an object is printed at the
    end, and nothing else. `tell`: whether results are printed at all."""
    torch_module("measure.bench.sweep_run", "running cases needs")
    live = on_a_terminal() and not json
    with StopRequests() as stop, SweepProgress(live=live, quiet=json) as line:
        sweep = SweepRun(folder, _launcher(folder), watch=line, stopped=stop, notify=_notify).go()
    if json and tell:
        print(to_json.dumps(as_dict(folder, sweep)))
    elif tell:
        show_ranking(sweep)
        print(f"\n{counts(sweep)} · {folder.path}")
    if sweep.ended:
        return 0
    minutes = f"{sweep.settings.budget_gpu_minutes or 0:g} {device(sweep.settings)}-minutes"
    budget = f"the budget of {minutes} is spent"
    why = "stopped" if stop.asked else budget
    print(f"{why}: `penteract bench {folder.path}` goes on", file=sys.stderr)
    return Preempted.exit_code


def _launcher(folder: SweepFolder) -> Launcher:
    return slurm_launcher(folder) if folder.settings().launcher == "slurm" else LocalLauncher()


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_dict(folder: SweepFolder, sweep: Sweep) -> dict[str, Any]:
    """A sweep as JSON: its values (`measure/schemas/sweep.py`), its ranking, and what it says of the plan."""
    rows = rank(numbers_of(sweep))
    ranking = [{"case": r.case.name, "place": r.place, "tied": r.tied, "vague": r.vague, "planned": r.planned,
                "time_error": r.time_error, "memory_error": r.memory_error, "right": r.right}
               for r in rows]  # fmt: skip
    found = verdict(rows)
    return {"folder": str(folder.path), "ended": sweep.ended, **asdict(sweep), "ranking": ranking,
            "plan": None if found is None else asdict(found)}  # fmt: skip


def show_ranking(sweep: Sweep) -> None:
    """Print what was measured, and how good the plan was."""
    rows = rank(numbers_of(sweep))
    show(*ranked(sweep, rows), *about_plan(verdict(rows)))
