"""The files that `penteract plan` writes: checked before the search, written after it. A stopped plan reports those
that were not written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penteract.errors import BadInput, DiskFailure
from penteract.planner.ask import Ask
from penteract.planner.options import check_option
from penteract.planner.plan import Plan
from penteract.planner.report.host_room import HostRoom
from penteract.planner.report.runfile import left_open, run_file
from penteract.planner.report.trace import check_file, check_pp_rank
from penteract.planner.report.trace import trace as write_trace
from penteract.planner.search.best import Timed
from penteract.units import gib


def check_files(out: Path | None, trace: Path | None, pp_rank: int | None) -> None:
    """Check the paths and the pipeline rank before the search, which may take long. Raises BadInput."""
    if out is not None:
        check_file(out, "--out")
    if trace is None:
        if pp_rank is not None:
            raise BadInput("USAGE", "a pipeline rank without a trace", where="--trace-pp-rank", found="no --trace",
                           fix="--trace step.json")  # fmt: skip
        return
    check_file(trace)
    if out is not None and out.resolve() == trace.resolve():
        raise BadInput("USAGE", "two files with the same name", where="--trace", found=trace, fix="another name")
    if pp_rank is not None:
        check_option("--trace-pp-rank", pp_rank)


def write_all(
    found: Plan, chosen: Timed, number: int, out: Path | None, trace: Path | None, pp_rank: int | None
) -> list[str]:  # fmt: skip
    """Write the requested files, after all checks have passed; returns lines to print about them."""
    lines = list[str]()
    if trace is not None:
        check_pp_rank(found, chosen, pp_rank)
    if out is not None:
        _write(out, found, chosen)
        lines = [left_open(out, _ask_for(found, chosen), chosen.layout, chosen.time.seconds)]
    if trace is not None:
        with report_if_stopped(trace):
            write_trace(found, trace, number=number, pp_rank=pp_rank)
        lines = [_traced(chosen, trace, pp_rank), *lines]
    return lines


def not_written(*files: Path | None) -> None:
    """Print that these files were not written because the user stopped the search."""
    for file in files:
        if file is not None:
            print(f"stopped: {file} was not written", file=sys.stderr)


@contextmanager
def report_if_stopped(*files: Path | None) -> Iterator[None]:
    """On Ctrl-C inside the block, call `not_written` and pass the interrupt on."""
    try:
        yield
    except KeyboardInterrupt:
        not_written(*files)
        raise


def _traced(chosen: Timed, trace: Path, pp_rank: int | None) -> str:
    pp = chosen.layout.pp
    every = f"all {pp} pipeline ranks" if pp > 1 else "its one pipeline rank"
    of = every if pp_rank is None else f"pipeline rank {pp_rank} of {pp}"
    return f"Trace: {trace} has a step of {of}; open it in ui.perfetto.dev or chrome://tracing"


def _ask_for(found: Plan, chosen: Timed) -> Ask:
    """The question, restricted to the precision of the chosen layout."""
    return replace(found.ask, precision=chosen.estimate.precision, also=())


def _write(path: Path, found: Plan, chosen: Timed) -> None:
    if (refusal := found.off_hosts(chosen.estimate)) is not None:
        raise refusal
    if not found.counts.fit:
        raise BadInput("MEMORY", "no run file for a layout that does not fit", where="--out",
                       found=f"{gib(chosen.estimate.allocated):.1f} GiB a {found.ask.devices()}",
                       allowed=f"{gib(found.ask.usable):.1f} GiB",
                       fix=f"another layout, or {found.ask.more_memory}")  # fmt: skip
    try:
        background = HostRoom.of(found, chosen).saves_in_background
        step = chosen.time.seconds
        text = run_file(_ask_for(found, chosen), chosen.layout, step, path.name, background=background)
        path.write_text(text, encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        raise BadInput(
            "FILE", "cannot be written", where="--out", found=path, fix="name a file in a folder that exists"
        ) from None
    except OSError as error:
        raise DiskFailure.of(error, f"--out {path}") from None
