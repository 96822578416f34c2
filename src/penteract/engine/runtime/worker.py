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
from penteract.engine.session.session import Orders, Session, closing_line, rundir, set_up
from penteract.errors import PeerLost, PenteractError


def work(spec: RunSpec, rank: Rank, orders: Orders) -> int:
    """Train on this rank; errors reach the others before they leave."""
    set_up(spec)
    with watched(rank, orders.folder):
        session = Session(spec, rank, orders)
        session.open()
        result = session.go()
        if orders.as_json and rank.number == 0:
            print(closing_line(result), flush=True)
    rank.leave()
    return 0


def joined(folder: Callable[[], Path], spec: RunSpec, words: list[str]) -> int:
    """A rank that a launcher made: rank 0 makes the run's folder, all train in it."""
    rank = join(os.environ, spec.precision.device)
    said = ""
    try:
        said = str(folder()) if rank.number == 0 else ""
    except PenteractError as e:
        rank.agree(f"!{e}")
        raise
    agreed = rank.agree(said)
    if agreed.startswith("!"):
        raise PeerLost("PEER", "rank 0 could not make the run's folder", found=agreed[1:])
    orders = _orders([agreed, *words])[0]
    try:
        return work(spec, rank, orders)
    finally:
        if rank.number == 0:
            rundir.stay(orders.folder)


def main(argv: list[str]) -> int:
    """Run folder in, exit code out."""
    orders, debug = _orders(argv)
    try:
        spec = resolve(orders.folder / (rundir.NEXT if orders.resume else rundir.RUN), "").run
        return work(spec, join(os.environ, spec.precision.device), orders)
    except Exception as e:
        error = from_exception(e)
        if debug:
            traceback.print_exc()
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _orders(argv: list[str]) -> tuple[Orders, bool]:
    parser = argparse.ArgumentParser(prog="penteract.engine.runtime.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--predicted", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    asked = parser.parse_args(argv)
    return Orders(asked.folder, asked.compare, asked.resume, asked.init, asked.json, asked.predicted), asked.debug


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
