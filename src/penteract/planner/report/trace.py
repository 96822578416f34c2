"""The step of a planned layout as a trace file, written during the simulation. A failure leaves no file."""

from __future__ import annotations

from pathlib import Path

from penteract.errors import BadInput, DiskFailure
from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed
from penteract.readings.time.timelines.trace import write_trace
from penteract.units import gib

_FOLDER = "name a file in a folder that exists"
_NAMES = {"--trace": "step.json", "--out": "run.toml", "--record": "accuracy.json"}


def check_file(path: Path, where: str = "--trace") -> None:
    """Refuse, before any work, a path that cannot be written."""
    if path.is_dir():
        raise BadInput(
            "FILE", "it is a folder", where=where, found=path, fix=f"name a file in it: {path / _NAMES[where]}"
        )
    if path.exists():
        raise BadInput("FILE", "it exists already", where=where, found=path, fix="choose another name, or remove it")
    if not path.parent.is_dir():
        raise BadInput("FILE", "cannot be written", where=where, found=path, fix=_FOLDER)


def check_pp_rank(found: Plan, timed: Timed, pp_rank: int | None) -> None:
    """Refuse a layout that does not fit, or a pipeline rank that it does not have."""
    if (refusal := found.off_hosts(timed.estimate)) is not None:
        raise refusal
    if not found.fits(timed.estimate):
        raise BadInput("MEMORY", "no trace of what does not fit", where="--trace",
                       found=f"{gib(timed.estimate.allocated):.1f} GiB a {found.ask.devices()}",
                       allowed=f"{gib(found.ask.usable):.1f} GiB",
                       fix=f"another layout, or {found.ask.more_memory}")  # fmt: skip
    pp = timed.layout.pp
    if pp_rank is not None and not 0 <= pp_rank < pp:
        allowed = f"0 to {pp - 1}" if pp > 1 else "0"
        raise BadInput("VALUE", f"no such pipeline rank of {pp}", where="--trace-pp-rank", found=pp_rank,
                       allowed=allowed, fix=f"--trace-pp-rank {pp - 1}")  # fmt: skip


def trace(found: Plan, path: str | Path, *, number: int = 1, pp_rank: int | None = None) -> None:
    """Write the step of the `number`-th best layout of a plan as a Chrome trace: of all pipeline ranks, or of one.

    ui.perfetto.dev and chrome://tracing open it. Raises BadInput if the file exists or cannot be written, if nothing
    fits, or if there is no such pipeline rank; nothing is written then.
    """
    path, timed = Path(path), found.number(number)
    check_file(path)
    check_pp_rank(found, timed, pp_rank)
    pp_ranks = range(timed.layout.pp) if pp_rank is None else (pp_rank,)
    steps = found.search.estimators[timed.estimate.precision].steps
    try:
        file = path.open("x", encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise BadInput("FILE", "cannot be written", where="--trace", found=path, fix=_FOLDER) from None
    except OSError as error:
        raise DiskFailure.of(error, f"--trace {path}") from None
    try:
        with file:
            write_trace(steps, timed.layout, file.write, pp_ranks)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DiskFailure.of(error, f"--trace {path}") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
