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
from penteract.measure.calibrate.links.link_workloads import Hosts, LinkWorkload
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows

ROUNDS = 5
LIMITS = Limits(join=120, compile=60, step=60)  # seconds without progress: a calibration is short
Times = list[float] | None  # of each round; None of a rank that took no part


@dataclass(slots=True)
class LinkMeasurement:
    """One rank's part. `times`: microseconds by key, alike on all ranks."""

    rank: Rank
    hosts: Hosts
    operations: LinkOperations
    clock: LinkClock
    times: dict[Key, float | None]

    @staticmethod
    def of(rank: Rank, hosts: Hosts, rows: MeasuredRows | None) -> LinkMeasurement:
        """`rows`: of rank 0, None on others."""
        mine = [[*key, us] for key, us in rows.rows.items()] if rows is not None else []
        shared: list[list[str | int]] = json.loads(rank.broadcast(json.dumps(mine)))
        times: dict[Key, float | None] = {tuple(row[:-1]): row[-1] for row in shared}  # type: ignore[misc]
        return LinkMeasurement(rank, hosts, LinkOperations.of(rank, hosts), link_clock(rank.device), times)

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
        clock, product = self.clock, self.times.get(self.hosts.products().rows[0][0]) or 1.0
        if not workload.size:
            return clock.product
        if op is None:
            return None
        alone = self.times.get(workload.alone) or 1.0
        match workload.way:
            case "alone" | "between":
                return lambda: clock.alone(op)
            case "under":
                return lambda: clock.under_product(op, alone, product)
            case "contended":
                return lambda: clock.contended(op, alone, product)


def measure_all(
    rank: Rank, each: int, rows: MeasuredRows | None, sizes: Sequence[int], seconds: float, *, pairs_only: bool
) -> None:  # fmt: skip
    """Measure what has no row yet, for about `seconds`. `each`: ranks of a host. `rows`: of rank 0, which writes them
    and decides; None on others."""
    begun, hosts = time.monotonic(), Hosts(rank.world // each, each)
    here = LinkMeasurement.of(rank, hosts, rows)
    every = hosts.pairs(sizes[0]) if pairs_only else hosts.workloads(sizes, gpu=rank.device.type == "cuda")
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


def join_all(device: str, listener: int | None = None) -> tuple[Rank, int]:
    """(this rank among those that a launcher started, ranks of a host). Raises BadInput where hosts differ."""
    torch.set_grad_enabled(False)
    each = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    facts = {"ranks of a host": str(each)}
    return join(os.environ, device, facts, LIMITS, listener, take_key(os.environ)), each


def joined(
    folder: Path, path: Path, about: dict[str, str], device: str, sizes: Sequence[int], seconds: float
) -> None:  # fmt: skip
    """Measure as a rank that a launcher such as torchrun started. Raises PenteractError."""
    stopping = Stopping.of_process()
    rank, each = join_all(device)
    with watched(rank, folder, stopping, launcher_reports=True):
        stopping.enter(Phase.WORKING, str(folder))
        rank.progress.enter("compile")
        rows = None if rank.number else MeasuredRows.of(path, about)
        measure_all(rank, each, rows, sizes, seconds, pairs_only=False)
    rank.leave()


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
            rank, each = join_all(args.device, args.store_fd)
            with watched(rank, args.folder, stopping, launcher_reports=True):
                stopping.enter(Phase.WORKING, str(args.folder))
                rank.progress.enter("compile")
                rows = None if rank.number else MeasuredRows.of(args.rows, args.about)
                measure_all(rank, each, rows, args.sizes, args.seconds, pairs_only=args.pairs)
            rank.leave()
        except Exception as e:
            error = from_exception(e)
            if number:  # into its log
                traceback.print_exc()
            if not rundir.errors(args.folder):  # it failed before it was watched
                rundir.append_error(args.folder, rundir.error_row(error, number, e))
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
