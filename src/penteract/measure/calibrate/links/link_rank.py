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
from penteract.engine.device.device import device_of
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank, join
from penteract.engine.rank.run_key import take_key
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.printing import never_fails
from penteract.engine.runtime.watch import watched
from penteract.errors import Preempted
from penteract.measure.calibrate.links.link_clock import LinkClock, link_clock
from penteract.measure.calibrate.links.link_operations import LinkOperation, LinkOperations
from penteract.measure.calibrate.links.link_workloads import Hosts, LinkWorkload
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows

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
    rounds: int

    @staticmethod
    def of(rank: Rank, hosts: Hosts, rows: MeasuredRows | None, rounds: int) -> LinkMeasurement:
        """`rows`: of rank 0, None on others."""
        mine = [[*key, us] for key, us in rows.rows.items()] if rows is not None else []
        shared: list[list[str | int]] = json.loads(rank.broadcast(json.dumps(mine)))
        times: dict[Key, float | None] = {tuple(row[:-1]): row[-1] for row in shared}  # type: ignore[misc]
        return LinkMeasurement(rank, hosts, LinkOperations.of(rank, hosts), link_clock(rank.device), times, rounds)

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
        for _ in range(self.rounds):
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


@dataclass(frozen=True, slots=True)
class LinkWork:
    """What ranks are to measure: what has no row yet in the file `rows` of the machine `about`, for about `seconds`,
    each `rounds` times. `folder`: where they leave how they failed."""

    folder: Path
    rows: Path
    about: dict[str, str]
    device: str
    seconds: float
    sizes: Sequence[int]
    rounds: int
    pairs: bool = False


def joined(work: LinkWork, listener: int | None = None) -> None:
    """Be one of the ranks that a launcher, such as torchrun, has started. Raises PenteractError."""
    stopping = Stopping.of_process()
    torch.set_grad_enabled(False)
    each = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    facts = {"ranks of a host": str(each)}  # as equal as versions
    rank = join(os.environ, work.device, facts, LIMITS, listener, take_key(os.environ))
    with watched(rank, work.folder, stopping, launcher_reports=True):
        stopping.enter(Phase.WORKING, str(work.folder))
        rank.progress.enter("compile")
        measure_all(work, rank, each, stopping)
    rank.leave()


def measure_all(work: LinkWork, rank: Rank, each: int, stopping: Stopping) -> None:
    """Measure on this rank. Rank 0 writes the rows, and decides when time is over. `each`: ranks of a host. Raises
    Preempted on all ranks once one is asked to stop."""
    rows = None if rank.number else MeasuredRows.of(work.rows, work.about)
    begun, hosts = time.monotonic(), Hosts(rank.world // each, each)
    here = LinkMeasurement.of(rank, hosts, rows, work.rounds)
    direct = bool(json.loads(rank.broadcast(json.dumps(device_of(rank.device).reads_peers))))
    if direct:
        here.operations.share(max(work.sizes))
    every = hosts.workloads(work.sizes, gpu=rank.device.type == "cuda", direct=direct)
    todo = here.missing(hosts.pairs(work.sizes[0]) if work.pairs else every)
    for i, workload in enumerate(todo):
        clocks: list[tuple[float, bool]] = rank.gather((time.monotonic() - begun, stopping.asked))
        spent = clocks[0][0]
        if any(asked for _, asked in clocks):
            raise Preempted("STOPPED", "stopped before all links were measured", where=str(work.rows),
                            fix="run it again to go on")  # fmt: skip
        if spent > work.seconds:
            return
        if rows is not None and not i % 10:
            left = min(work.seconds - spent, spent / i * (len(todo) - i)) if i else work.seconds
            name = " ".join(map(str, workload.rows[0][0]))
            line = f"links {i}/{len(todo)} · {name} · {spent:.0f} s, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
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
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--store-fd", type=int)
    given = vars(parser.parse_args(argv))
    listener, number = given.pop("store_fd"), int(os.environ.get("RANK", "0"))
    work = LinkWork(**given)
    with Stopping.of_process(), never_fails():
        try:
            joined(work, listener)
        except Exception as e:
            error = from_exception(e)
            if number:  # into its log
                traceback.print_exc()
            rundir.append_unwatched(work.folder, error, number, e)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
