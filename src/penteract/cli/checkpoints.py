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

_NOT_READ = "not read"


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint. `proven`: when it was new. `state`: not read, verified, damaged or set aside; `problem`: of a
    damaged one."""

    step: int
    epoch: int
    folder: str
    saved: str
    bytes: int
    proven: bool
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

    A proven one was read back when it was new, and a finite step was trained after it. Whether its bytes are still the
    same, only --verify tells: without it, manifests and the sizes of files are checked. Steps that a resumed run went
    back from are set aside. Exit code 65 when one is damaged.
    """
    if find_spec("torch") is None:
        raise BadInput("TORCH", "reading checkpoints needs torch", found="none", fix="pip install 'penteract[train]'")
    if prune is not None and prune < 1:
        raise BadInput("USAGE", "not a number of steps to keep", where="--prune", found=prune, allowed=">= 1")
    folder = find_run(run, keys()["output.folder"].default, flag="penteract checkpoints", needs="checkpoints")
    checkpoint_folder.find(folder)
    removed = _prune(folder, prune) if prune is not None else []
    vanished = list[str]()
    rows = list(_rows(folder / "checkpoints", verify=verify, vanished=vanished))
    if json:
        listed = [asdict(row) for row in rows]
        print(dumps({"run": str(folder), "checkpoints": listed, "removed": removed, "vanished": vanished}))
    else:
        for at in vanished:
            print(f"{show_path(Path(at))}: the run removed it meanwhile, left out")
        _show(folder, rows, removed)
    return CorruptData.exit_code if any(row.state == "damaged" for row in rows) else 0


def _rows(folder: Path, *, verify: bool, vanished: list[str]) -> Iterator[CheckpointRow]:
    """A row for each step. Those that a live run removes meanwhile are added to `vanished`."""
    engine = import_module("penteract.engine.checkpoint")
    every = [(one, "") for one in engine.committed(folder)]
    for aside in sorted(folder.glob("aside-*"), reverse=True):
        by = f"set aside by epoch {int(aside.name.partition('-')[2])}"
        every += [(one, by) for one in engine.committed(aside)]
    for one, aside_by in every:
        try:
            row = _row(one, *((aside_by, "") if aside_by else _checked(engine, one.at, verify=verify)))
        except FileNotFoundError:  # the run renames a step before it removes it
            vanished.append(str(one.at))
            continue
        if one.at.exists():
            yield row
        else:  # what looks like damage is that it is gone
            vanished.append(str(one.at))


def _checked(engine: Any, at: Path, *, verify: bool) -> tuple[str, str]:
    """The state of a checkpoint, and the problem of a damaged one."""
    try:
        engine.check(at)
        if verify:
            engine.verify(at)
    except PenteractError as e:
        return "damaged", e.found if e.what == engine.DAMAGED else f"{e.what} {e.found}".strip()
    return ("verified" if verify else _NOT_READ), ""


def _row(one: Any, state: str, problem: str = "") -> CheckpointRow:
    at: Path = one.at
    manifest = at / "manifest.json"  # written last; the folder changes when the checkpoint is proven, too
    last = manifest if manifest.exists() else at
    saved = datetime.fromtimestamp(last.stat().st_mtime, UTC).isoformat(timespec="seconds")
    size = sum(file.lstat().st_size for file in at.iterdir())
    return CheckpointRow(one.step, one.epoch, str(at), saved, size, one.proven, state, problem)


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
    table.add_column("when new", no_wrap=True)
    table.add_column("now")
    for row in rows:
        state = f"{row.state}: {row.problem}" if row.problem else row.state
        table.add_row(
            str(row.step), str(row.epoch), show_bytes(row.bytes), row.saved.partition("+")[0].replace("T", " "),
            "proven" if row.proven else "", state,
        )  # fmt: skip
    Console(highlight=False, markup=False).print(table)
    if any(row.proven for row in rows):
        print("proven: it was read back when it was new, and a finite step was trained after it")
    if any(row.state == _NOT_READ for row in rows):
        print("not read: only manifests and the sizes of files were checked; --verify reads every byte")
