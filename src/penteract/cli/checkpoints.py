"""`penteract checkpoints`: list a run's checkpoints, verify their bytes, remove old ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

from cyclopts import Parameter

from penteract.cli.resolve.folders import find_run
from penteract.config.files.keys import keys
from penteract.engine.run_folder import checkpoint_folder
from penteract.errors import BadInput, CorruptData, PenteractError
from penteract.units import show_bytes, show_path

EXAMPLES = (
    "penteract checkpoints",
    "penteract checkpoints runs/2026-11-21_tiny_a1b2c3 --verify",
    "penteract checkpoints latest --prune 2",
)


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint. `state`: proven, intact, verified, damaged or aside; `problem`: of a damaged one."""

    step: int
    epoch: int
    folder: str
    saved: str
    bytes: int
    state: str
    problem: str = ""


def checkpoints(
    run: Annotated[str, Parameter(help="A run folder, or latest.")] = "latest",
    /,
    *,
    verify: Annotated[bool, Parameter(negative="", help="Read every byte and compare digests.")] = False,
    prune: Annotated[
        int | None,
        Parameter(
            help="Keep this many checkpoints, and the newest proven one; remove older ones and all that are set aside."
        ),
    ] = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> int:
    """List a run's checkpoints, the newest first; verify or remove them.

    A proven one was read back after it was written, and a finite step was trained after it. Steps that a resumed run
    went back from are set aside. Exit code 65 when one is damaged.
    """
    if find_spec("torch") is None:
        raise BadInput("TORCH", "reading checkpoints needs torch", found="none", fix="pip install 'penteract[train]'")
    if prune is not None and prune < 1:
        raise BadInput("USAGE", "not a number of steps to keep", where="--prune", found=prune, allowed=">= 1")
    folder = find_run(run, keys()["output.folder"].default, flag="penteract checkpoints", needs="checkpoints")
    checkpoint_folder.find(folder)
    removed = _prune(folder, prune) if prune is not None else []
    rows = list(_rows(folder / "checkpoints", verify=verify))
    if json:
        print(dumps({"run": str(folder), "checkpoints": [asdict(row) for row in rows], "removed": removed}))
    else:
        _show(folder, rows, removed)
    return CorruptData.exit_code if any(row.state == "damaged" for row in rows) else 0


def _rows(folder: Path, *, verify: bool) -> Iterator[CheckpointRow]:
    engine = import_module("penteract.engine.checkpoint")
    for one in engine.committed(folder):
        state, problem = ("proven" if one.proven else "intact"), ""
        try:
            engine.check(one.at)
            if verify:
                engine.verify(one.at)
                state = "proven, verified" if one.proven else "verified"
        except PenteractError as e:
            state, problem = "damaged", f"{e.what} {e.found}".strip()
        yield _row(one, one.at, state, problem)
    for aside in sorted(folder.glob("aside-*"), reverse=True):
        for one in engine.committed(aside):
            yield _row(one, one.at, f"set aside by epoch {int(aside.name.partition('-')[2])}")


def _row(one: Any, at: Path, state: str, problem: str = "") -> CheckpointRow:
    manifest = at / "manifest.json"  # written last; the folder changes when the checkpoint is proven, too
    last = manifest if manifest.exists() else at
    saved = datetime.fromtimestamp(last.stat().st_mtime, UTC).isoformat(timespec="seconds")
    size = sum(file.lstat().st_size for file in at.iterdir())
    return CheckpointRow(one.step, one.epoch, str(at), saved, size, state, problem)


def _prune(folder: Path, keep: int) -> list[str]:
    """Remove old checkpoints, as the holder of the run; returns their folders."""
    engine, lease = import_module("penteract.engine.checkpoint"), import_module("penteract.engine.run_folder.lease")
    where = checkpoint_folder.find(folder, write=True)
    run_lease = lease.take(folder).begin()
    try:
        with engine.failing(where, "remove old checkpoints"):
            before = [*(one.at for one in engine.committed(where)), *where.glob("aside-*/step-*")]
            engine.take(where, run_lease.epoch)
            engine.prune(where, keep, run_lease.epoch)
            for aside in where.glob("aside-*"):
                rmtree(aside)
    finally:
        run_lease.end()
    return [str(at) for at in before if not at.exists()]


def _show(folder: Path, rows: Sequence[CheckpointRow], removed: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    for at in removed:
        print(f"removed {at}")
    if not rows:
        print(f"{show_path(folder)}: no checkpoints yet")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("step", "epoch", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("saved (UTC)", no_wrap=True)
    table.add_column("state")
    for row in rows:
        state = f"{row.state}: {row.problem}" if row.problem else row.state
        table.add_row(
            str(row.step), str(row.epoch), show_bytes(row.bytes), row.saved.partition("+")[0].replace("T", " "), state
        )
    Console(highlight=False, markup=False).print(table)
