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
from penteract.engine.session.lease import Lease
from penteract.engine.session.session import Session, SessionOptions, closing_line, rundir, set_up
from penteract.errors import PeerLost, PenteractError


def work(spec: RunSpec, rank: Rank, options: SessionOptions) -> int:
    """Train on this rank. An error is reported to the other ranks before this one ends."""
    set_up(spec)
    with watched(rank, options.folder):
        session = Session(spec, rank, options)
        session.open()
        result = session.go()
        if options.as_json and rank.number == 0:
            print(closing_line(result), flush=True)
    rank.leave()
    return 0


def joined(take: Callable[[], tuple[Path, Lease]], spec: RunSpec, words: list[str]) -> int:
    """Train as a rank that a launcher started. Rank 0 creates the run's folder or takes it, and all ranks use it."""
    rank, path, lease = join(os.environ, spec.precision.device), "", None
    try:
        if rank.number == 0:
            folder, lease = take()
            path = f"{lease.epoch}:{folder}"
    except PenteractError as e:
        rank.agree(f"!{e}")
        raise
    agreed = rank.agree(path)
    if agreed.startswith("!"):
        raise PeerLost("PEER", "rank 0 could not make the run's folder", found=agreed[1:])
    epoch, _, name = agreed.partition(":")
    options = _options([name, f"--epoch={epoch}", *words])[0]
    try:
        return work(spec, rank, options)
    finally:
        if lease is not None:
            rundir.cancel_resume(options.folder)
            lease.end()


def main(argv: list[str]) -> int:
    """Train in the run folder that the arguments name; returns the exit code."""
    options, debug = _options(argv)
    try:
        spec = resolve(options.folder / (rundir.NEXT if options.resume else rundir.RUN), "").run
        return work(spec, join(os.environ, spec.precision.device), options)
    except Exception as e:
        error = from_exception(e)
        if debug:
            traceback.print_exc()
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _options(argv: list[str]) -> tuple[SessionOptions, bool]:
    parser = argparse.ArgumentParser(prog="penteract.engine.runtime.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--predicted", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args(argv)
    options = SessionOptions(args.folder, args.compare, args.resume, args.init, args.json, args.predicted, args.epoch)
    return options, args.debug


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
