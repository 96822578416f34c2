"""The process of one rank: `python -m penteract.engine.runtime.worker RUN_DIR …`, started by the launcher."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from penteract.config.rules.resolve import resolve
from penteract.config.run import RunSpec
from penteract.engine.runtime.rank import Rank, join
from penteract.engine.runtime.watch import from_exception, watched
from penteract.engine.session.session import Session, SessionOptions, closing_line, rundir, set_up
from penteract.errors import PeerLost, PenteractError


def work(spec: RunSpec, rank: Rank, options: SessionOptions, *, told: bool = False) -> int:
    """Train on this rank. An error is reported to the other ranks before this one ends. `told`: by a launcher."""
    set_up(spec)
    with watched(rank, options.folder, told=told):
        session = Session(spec, rank, options)
        session.open()
        result = session.go()
        if options.as_json and rank.number == 0:
            print(closing_line(result), flush=True)
    rank.leave()
    return 0


def joined(folder: Callable[[], Path], spec: RunSpec, words: list[str]) -> int:
    """Train as a rank that a launcher started. Rank 0 creates the run's folder, and all ranks use it."""
    rank = join(os.environ, spec.precision.device)
    path = ""
    try:
        path = str(folder()) if rank.number == 0 else ""
    except PenteractError as e:
        rank.agree(f"!{e}")
        raise
    agreed = rank.agree(path)
    if agreed.startswith("!"):
        raise PeerLost("PEER", "rank 0 could not make the run's folder", found=agreed[1:])
    options = _options([agreed, *words])[0]
    try:
        return work(spec, rank, options)
    finally:
        if rank.number == 0:
            rundir.cancel_resume(options.folder)


def main(argv: list[str]) -> int:
    """Train in the run folder that the arguments name; returns the exit code.

    Rank 0 shares the terminal with the launcher, which prints the error that ended the run. So it prints its own only
    where it could not write it to errors.jsonl; other ranks print into their logs.
    """
    options, debug = _options(argv)
    number, earlier = int(os.environ.get("RANK", "0")), rundir.errors_size(options.folder)
    try:
        spec = resolve(options.folder / (rundir.NEXT if options.resume else rundir.RUN), "").run
        return work(spec, join(os.environ, spec.precision.device), options, told=number == 0)
    except Exception as e:
        error = from_exception(e)
        if debug:
            traceback.print_exc()
        if not rundir.errors(options.folder, earlier):  # it failed before it was watched
            rundir.append_error(options.folder, rundir.error_row(error, number, e))
        if number or not rundir.errors(options.folder, earlier):
            print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _options(argv: list[str]) -> tuple[SessionOptions, bool]:
    parser = argparse.ArgumentParser(prog="penteract.engine.runtime.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--predicted", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args(argv)
    return SessionOptions(args.folder, args.compare, args.resume, args.init, args.json, args.predicted), args.debug


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
