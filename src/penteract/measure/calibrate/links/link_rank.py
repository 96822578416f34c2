"""The process of one rank that measures links: `python -m penteract.measure.calibrate.links.link_rank FOLDER …`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penteract.config.run import Limits
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank, join
from penteract.engine.rank.run_key import take_key
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.printing import never_fails
from penteract.engine.runtime.watch import watched
from penteract.measure.calibrate.links.link_clock import LinkClock, link_clock
from penteract.measure.calibrate.links.link_operations import LinkOperation, LinkOperations
from penteract.measure.calibrate.links.link_workloads import LinkWorkload, link_workloads, pairs, products_alone
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows

ROUNDS = 5
LIMITS = Limits(join=120, compile=60, step=60)  # seconds without progress: a calibration is short
Times = list[float] | None  # of each round; None of a rank that took no part


@dataclass(slots=True)
class LinkMeasurement:
    """One rank's part. `times`: microseconds by key, alike on all ranks."""

    rank: Rank
    operations: LinkOperations
    clock: LinkClock
    times: dict[Key, float | None]

    @staticmethod
    def of(rank: Rank, rows: MeasuredRows | None) -> LinkMeasurement:
        """`rows`: of rank 0, None on others."""
        mine = [[*key, us] for key, us in rows.rows.items()] if rows is not None else []
        shared: list[list[str | int]] = json.loads(rank.broadcast(json.dumps(mine)))
        return LinkMeasurement(
            rank,
            LinkOperations.of(rank),
            link_clock(rank.device),
            {tuple(row[:-1]): row[-1] for row in shared},  # type: ignore[misc]
        )

    def missing(self, every: Sequence[LinkWorkload]) -> list[LinkWorkload]:
        """The workloads of which a row is missing."""
        return [w for w in every if any(key not in self.times for key, _ in w.rows)]

    def measure(self, workload: LinkWorkload) -> list[tuple[Key, float, float]]:
        """(key, median microseconds, spread) of each row; alike on all ranks."""
        every: list[Times] = self.rank.gather(self._rounds(workload))
        found = list[tuple[Key, float, float]]()
        for key, ranks in workload.rows:
            of_ranks = [t for r in ranks if (t := every[r]) is not None]
            rounds = [statistics.median(some) for some in zip(*of_ranks, strict=True)]
            middle = statistics.median(rounds)
            self.times[key] = middle
            found.append((key, middle, (max(rounds) - min(rounds)) / middle))
        return found

    def _rounds(self, workload: LinkWorkload) -> Times:
        op = self.operations(workload)
        once = self._once(workload, op)
        if op is not None:
            op()  # connects what is not connected yet
        found = list[float]()
        for _ in range(ROUNDS):
            self.clock.settle()
            self.rank.barrier()
            if once is not None:
                found.append(once())
        return found if once is not None else None

    def _once(self, workload: LinkWorkload, op: LinkOperation | None) -> Callable[[], float] | None:
        """One round of this rank; None where it takes no part."""
        clock, product = self.clock, self.times.get(products_alone(self.rank.world).rows[0][0]) or 1.0
        if not workload.size:
            return clock.product
        if op is None:
            return None
        alone = self.times.get(workload.alone) or 1.0
        match workload.way:
            case "alone":
                return lambda: clock.alone(op)
            case "under":
                return lambda: clock.under_product(op, alone, product)
            case "contended":
                return lambda: clock.contended(op, alone, product)


def measure_all(
    rank: Rank, rows: MeasuredRows | None, sizes: Sequence[int], seconds: float, *, pairs_only: bool
) -> None:
    """Measure what has no row yet, for about `seconds`. `rows`: of rank 0, which writes them and decides; else None."""
    begun, here, gpu = time.monotonic(), LinkMeasurement.of(rank, rows), rank.device.type == "cuda"
    every = pairs(rank.world, sizes[0]) if pairs_only else link_workloads(rank.world, sizes, gpu=gpu)
    todo = here.missing(every)
    for i, workload in enumerate(todo):
        spent = rank.gather(time.monotonic() - begun)[0]
        if spent > seconds:
            return
        if rows is not None and not i % 10:
            left = min(seconds - spent, spent / i * (len(todo) - i)) if i else seconds
            name = " ".join(map(str, workload.rows[0][0]))
            print(
                f"links {i}/{len(todo)} · {name} · {spent:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True
            )
        for key, us, spread in here.measure(workload):
            if rows is not None:
                rows.add(key, us, spread)
        rank.progress.did(workload.kind)


def main(argv: list[str]) -> int:
    """Measure in the folder that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penteract.measure.calibrate.links.link_rank")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--about", type=json.loads, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], required=True)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--store-fd", type=int)
    args = parser.parse_args(argv)
    number = int(os.environ.get("RANK", "0"))
    with Stopping.of_process() as stopping, never_fails():
        try:
            torch.set_grad_enabled(False)
            rank = join(os.environ, args.device, {}, LIMITS, args.store_fd, take_key(os.environ))
            with watched(rank, args.folder, stopping, launcher_reports=True):
                stopping.enter(Phase.WORKING, str(args.folder))
                rank.progress.enter("compile")
                rows = None if rank.number else MeasuredRows.of(args.rows, args.about)
                measure_all(rank, rows, args.sizes, args.seconds, pairs_only=args.pairs)
            rank.leave()
        except Exception as e:
            error = from_exception(e)
            traceback.print_exc() if number else None  # into its log
            if not rundir.errors(args.folder):  # it failed before it was watched
                rundir.append_error(args.folder, rundir.error_row(error, number, e))
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
