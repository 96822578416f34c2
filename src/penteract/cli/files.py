"""The files that `penteract plan` writes: looked at before the search, written after it, or told that they were not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penteract.errors import BadInput, DiskFailure
from penteract.planner.ask import Ask
from penteract.planner.plan import Plan
from penteract.planner.report.runfile import left_open, run_file
from penteract.planner.report.trace import check_file, check_stage
from penteract.planner.report.trace import trace as write_trace
from penteract.planner.search.best import Timed
from penteract.units import gib


def check_files(out: Path | None, trace: Path | None, stage: int | None) -> None:
    """Before the search, which may take long."""
    if out is not None:
        check_file(out, "--out")
    if trace is None:
        if stage is not None:
            raise BadInput("USAGE", "a stage of no trace", where="--trace-stage", found="no --trace",
                           fix="--trace step.json")  # fmt: skip
        return
    check_file(trace)
    if out is not None and out.resolve() == trace.resolve():
        raise BadInput("USAGE", "two files of one name", where="--trace", found=trace, fix="another name")
    if stage is not None and stage < 0:
        raise BadInput("VALUE", "stages count from 0", where="--trace-stage", found=stage, fix="--trace-stage 0")


def write_all(
    found: Plan, chosen: Timed, number: int, out: Path | None, trace: Path | None, stage: int | None
) -> list[str]:  # fmt: skip
    """Write what was asked for, once nothing speaks against any of it; and what to say of it."""
    told = list[str]()
    if trace is not None:
        check_stage(found, chosen, stage)
    if out is not None:
        _write(out, found, chosen)
        told = [left_open(out, _asked(found, chosen), chosen.layout)]
    if trace is not None:
        with told_if_stopped(trace):
            write_trace(found, trace, number=number, stage=stage)
        told = [_traced(chosen, trace, stage), *told]
    return told


def not_written(*files: Path | None) -> None:
    """Say so of files that were asked for, where a person stopped what was to be in them."""
    for file in files:
        if file is not None:
            print(f"stopped: {file} was not written", file=sys.stderr)


@contextmanager
def told_if_stopped(*files: Path | None) -> Iterator[None]:
    """The same of a Ctrl-C inside."""
    try:
        yield
    except KeyboardInterrupt:
        not_written(*files)
        raise


def _traced(chosen: Timed, trace: Path, stage: int | None) -> str:
    pp = chosen.layout.pp
    of = f"stage {stage} of {pp}" if stage is not None else f"all {pp} stages" if pp > 1 else "its one stage"
    return f"Trace: {trace} has a step of {of}; open it in ui.perfetto.dev or chrome://tracing"


def _asked(found: Plan, chosen: Timed) -> Ask:
    """The question in the precision of one answer."""
    return replace(found.ask, precision=chosen.estimate.precision, also=())


def _write(path: Path, found: Plan, chosen: Timed) -> None:
    if not found.counts.fit:
        raise BadInput("MEMORY", "no run file of what does not fit", where="--out",
                       found=f"{gib(chosen.estimate.allocated):.1f} GiB a GPU",
                       allowed=f"{gib(found.ask.usable):.1f} GiB", fix="another layout, or more GPUs")  # fmt: skip
    try:
        path.write_text(run_file(_asked(found, chosen), chosen.layout), encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        raise BadInput(
            "FILE", "cannot be written", where="--out", found=path, fix="name a file in a folder that exists"
        ) from None
    except OSError as error:
        raise DiskFailure("DISK", error.strerror or "cannot be written", where=f"--out {path}") from None
