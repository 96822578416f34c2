"""The process of one rank: `python -m penteract.engine.worker RUN_DIR …`, started by the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch.distributed as dist

from penteract.engine.rank import Rank, join
from penteract.engine.session import Orders, Session, closing_line, set_up
from penteract.engine.watch import watched
from penteract.spec.resolve import resolve
from penteract.spec.run import RunSpec


def work(spec: RunSpec, rank: Rank, orders: Orders) -> int:
    """Train on this rank; errors reach the others before they leave."""
    set_up(spec)
    with watched(rank, orders.folder):
        session = Session(spec, rank, orders)
        session.open()
        result = session.go()
        if orders.as_json and rank.number == 0:
            print(closing_line(result), flush=True)
    if rank.world > 1:
        dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    """Run file in, exit code out."""
    parser = argparse.ArgumentParser(prog="penteract.engine.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    asked = parser.parse_args(argv)
    spec = resolve(asked.folder / "run.toml", "").run
    rank = join(os.environ, spec.precision.device, spec.precision.dtype)
    return work(spec, rank, Orders(asked.folder, asked.compare, asked.resume, asked.json))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
