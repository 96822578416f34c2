"""One rank of a case: `python -m penteract.measure.bench.ranks.rank_process CASE_FOLDER --attempt N`.

A launcher starts as many as the case has ranks, with torchrun's variables. Rank 0 writes running and done into the
case's status, with the result; the rank that fails first writes how. What no rank can write, because it was killed, the
sweep finds out from the launcher.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penteract.config.hardware import cluster, gpu
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.device.device import device_of
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.watch import watched
from penteract.engine.runtime.worker import join_run
from penteract.errors import BadInput, PeerLost, PenteractError, Preempted
from penteract.measure.bench.attempt_outcome import state_of
from penteract.measure.bench.ranks.case_measurement import measurement
from penteract.measure.bench.ranks.case_provenance import HotFacts, provenance
from penteract.measure.bench.ranks.timed_steps import samples_of, take_steps
from penteract.measure.calibrate.hardware_file import catalogued
from penteract.measure.schemas.sweep import CaseResult, CaseStatus, SweepSettings
from penteract.measure.schemas.sweep_folder import CaseFolder, SweepFolder, now
from penteract.readings.layers.expert_load import Balanced


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a case, as its ranks know it."""

    folder: CaseFolder
    number: int
    settings: SweepSettings
    began: str

    @property
    def spec(self) -> RunSpec:
        """The run, for as many steps as the sweep takes."""
        run = resolve(self.folder.run_file, "").run
        return replace(run, train=replace(run.train, steps=self.settings.warmup + self.settings.steps))

    def begin(self) -> None:
        """Write that it runs. Raises BadInput if a later attempt has begun."""
        self.folder.write_status(replace(self._status(), state="running", since=now()))

    def write(self, result: CaseResult) -> None:
        """Write what was measured. Raises BadInput if a later attempt has begun: its result stays."""
        self._status()
        self.folder.write_result(result)

    def _status(self) -> CaseStatus:
        """The case's, while it is of this attempt."""
        status = self.folder.status()
        if status.attempt != self.number:
            raise BadInput("ATTEMPT", "another attempt at this case has begun", where=str(self.folder.path),
                           found=status.attempt, allowed=self.number)  # fmt: skip
        return status

    def end(self, status: CaseStatus) -> None:
        """Write how it ended, if nobody has; what is known of earlier attempts stays."""
        before = self.folder.status()
        self.folder.ends(replace(before, attempt=self.number, state=status.state, since=now(),
                                 error=status.error, exit_code=status.exit_code))  # fmt: skip


def measure(attempt: Attempt, rank: Rank) -> None:
    """Take the steps on this rank. On rank 0, write the result and that the case is done."""
    spec, settings = attempt.spec, attempt.settings
    rank.progress.enter("data")
    samples = samples_of(spec, rank, settings.data)
    rank.progress.enter("compile")
    facts = HotFacts(rank.device, int(os.environ.get("LOCAL_RANK", "0")))
    middle = settings.warmup + (settings.steps + 1) // 2
    mine = take_steps(spec, rank, samples, lambda number: facts.ask() if number == middle else None)
    rank.progress.enter("save")
    every = rank.gather((mine, facts.found(), socket.gethostname()))
    if rank.number == 0:
        case, peak = attempt.folder.case(), _peak(settings, spec, rank)
        even = Balanced.of(spec.model, spec.layout, spec.sequence_length).rows
        measured = measurement(case, [one for one, _, _ in every], settings.warmup, settings.data, peak, even)
        source = provenance(
            rank.device, attempt.began, now(), [host for _, _, host in every], [some for _, some, _ in every],
            settings.command,
        )  # fmt: skip
        attempt.write(CaseResult(attempt=attempt.number, measured=measured, provenance=source))
    rank.barrier()


def _peak(settings: SweepSettings, spec: RunSpec, rank: Rank) -> float | None:
    """FLOP/s of a device, of the sweep's cluster or of the device's name; None if neither is known."""
    device = None
    with suppress(PenteractError):
        if settings.cluster:
            device = cluster(settings.cluster).gpu
        elif rank.device.type == "cuda" and (name := catalogued(device_of(rank.device).name)):
            device = gpu(name)
    with suppress(PenteractError):
        return None if device is None else device.peak(spec.precision.policy.products)
    return None


def main(argv: list[str]) -> int:
    """Take part in an attempt; returns the exit code, which is that of a training run with the same end."""
    parser = argparse.ArgumentParser(prog="penteract.measure.bench.ranks.rank_process")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--store-fd", type=int)
    args = parser.parse_args(argv)
    folder, number = CaseFolder(args.folder), int(os.environ.get("RANK", "0"))
    run_dir = folder.attempt(args.attempt)
    with Stopping.of_process() as stopping:
        attempt = None
        try:
            attempt = Attempt(folder, args.attempt, SweepFolder(args.folder.parent.parent).settings(), now())
            if number == 0:
                attempt.begin()
            rank = join_run(attempt.spec, args.store_fd)
            with watched(rank, run_dir, stopping, launcher_reports=True):
                stopping.enter(Phase.WORKING, str(run_dir))
                measure(attempt, rank)
            rank.leave()
        except Exception as e:
            error = from_exception(e)
            print(error, file=sys.stderr, flush=True)
            rundir.append_unwatched(run_dir, error, number, e)
            if attempt is not None and not isinstance(error, PeerLost | Preempted):
                attempt.end(
                    CaseStatus(state=state_of(error.exit_code), error=error.as_dict(), exit_code=error.exit_code)
                )
            return error.exit_code
        if number == 0:
            attempt.end(CaseStatus(state="done", exit_code=0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
