"""`penteract doctor`: what this machine has, what is wrong with it for training, what a run would use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penteract.cli.resolve.world import launched
from penteract.config.files.keys import keys
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.doctor.finding import Finding
from penteract.engine.run_folder import checkpoint_folder
from penteract.errors import BadInput

EXAMPLES = ("penteract doctor", "penteract doctor --json", "penteract doctor /scratch/runs")
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


def doctor(
    folder: Annotated[Path | None, Parameter(help="Where runs will be written, or a run; its disk is checked.")] = None,
    /,
    *,
    json: Annotated[
        bool,
        Parameter(negative="", help="Print one JSON object: can_train, findings (area, what, state, fix), machine."),
    ] = False,
) -> int:
    """Show what this machine has, what is wrong with it for training, and what a run would use.

    Exit code 0 when a run can start, also with warnings; 2 when something is bad: no torch, a disk that cannot be
    written, GPUs that are broken or that this torch cannot use.
    """
    report, probe = import_module("penteract.engine.doctor.report"), import_module("penteract.engine.doctor.probe.here")
    ranks, wrong = _ranks()
    disk, more = _disk(folder or Path(keys()["output.folder"].default))
    machine = probe.this_machine(disk, os.environ, ranks)
    findings = report.examine(machine, (*more, *wrong))
    if json:
        print(dumps(report.as_json(machine, findings)))
    else:
        _show(findings)
    return 0 if report.can_train(findings) else BadInput.exit_code


def _disk(folder: Path) -> tuple[Path, tuple[Finding, ...]]:
    """The folder whose disk matters: of a run, that of its checkpoints. And findings about them."""
    if not (folder / "run.toml").is_file():
        return folder, ()
    try:
        at = checkpoint_folder.find(folder, write=True)
    except BadInput as error:
        return folder, (Finding("disk", f"{error.what}: {error.found}", "bad", error.fix),)
    return at.resolve(), (Finding("disk", f"checkpoints of {folder} are in {at.resolve()}"),)


def _ranks() -> tuple[int, tuple[Finding, ...]]:
    """Ranks on this host: those a launcher started, or those a run starts by default. And findings about them."""
    try:
        place = launched(os.environ)
    except BadInput as error:
        return 1, (Finding("environment", f"{error.what}: {error.found}", "bad", "unset RANK WORLD_SIZE LOCAL_RANK"),)
    if place is None:
        return resolve().run.layout.world, ()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) else place.world, ()


def _show(findings: Sequence[Finding]) -> None:
    """One block for each area: each finding with its state in front and its fix below. Last, the counts by state."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)  # never wrapped: other programs read it
    for area, group in groupby(findings, key=lambda f: f.area):
        console.print(Text(area, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(min_width=max(map(len, _COLOURS)))
        table.add_column()
        for found in group:
            table.add_row("", Text(found.state, style=_COLOURS[found.state]), Text(found.what))
            if found.fix:
                table.add_row("", "", Text(f"fix: {found.fix}", style="italic"))
        with console.capture() as drawn:
            console.print(table)
        for line in drawn.get().splitlines():
            console.out(line.rstrip(), highlight=False)
    states = [f.state for f in findings]
    names = {"bad": "error", "warn": "warning", "note": "note"}
    counts = [f"{n} {name}{'s' * (n > 1)}" for state, name in names.items() if (n := states.count(state))]
    counts += ["no errors"] * ("bad" not in states)
    console.print(Text(f"{', '.join(counts)}: {'no run' if 'bad' in states else 'a run'} can start."))
