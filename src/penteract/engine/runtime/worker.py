"""The process of one rank: `python -m penteract.engine.runtime.worker RUN_DIR …`, started by the launcher; with
`--orders` these words come later (`prepared.py`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import run_values
from penteract.config.run import RunPrediction, RunSpec
from penteract.engine.data.description import describe
from penteract.engine.device.device import picked
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank, join
from penteract.engine.rank.run_key import take_key
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import checkpoint_folder
from penteract.engine.run_folder.lease import Lease
from penteract.engine.runtime.exits import ends_with
from penteract.engine.runtime.generation import Generation
from penteract.engine.runtime.prepared import ORDERS, orders
from penteract.engine.runtime.printing import never_fails
from penteract.engine.runtime.watch import watched
from penteract.engine.session.early_imports import begin_imports
from penteract.engine.session.garbage import imports_are_done
from penteract.engine.session.session import Session, SessionOptions, closing_line, rundir, set_up
from penteract.errors import PeerLost, PenteractError, Preempted

# Keys that decide no results: where files are, which are described by themselves, and how long to wait.
_OWN = ("output.", "slurm.", "checkpoint.folder", "limits.", "training.log_level", "data.source", "tokenizer.source")


def work(
    spec: RunSpec, rank: Rank, options: SessionOptions, stopping: Stopping,
    final: Callable[[int], None] = lambda code: None, parting: Callable[[], None] = lambda: None,
    *, launcher_reports: bool = False,
) -> int:  # fmt: skip
    """Train on this rank. An error is reported to the other ranks before this one ends. `final` is called with the
    exit code of a run that fails, `parting` where a thread ends the process. `launcher_reports`: a launcher prints the
    error of the run."""
    stopping.patience = max(stopping.patience, 2 * options.grace)
    with watched(rank, options.folder, stopping, final, parting, launcher_reports=launcher_reports):
        if rank.number == 0:  # the others have read the run's file: they have joined
            rundir.keep_device(options.folder, picked(rank.device))
        session = Session(spec, rank, options, stopping)
        session.open()
        stopping.enter(Phase.WORKING, str(options.folder))
        result = session.go()
        if options.as_json and rank.number == 0:
            print(closing_line(result), flush=True)
    rank.leave()
    return 0


def joined(
    take: Callable[[], tuple[Path, Lease, RunSpec]], spec: RunSpec, words: list[str], generation: Generation | None
) -> int:
    """Train as a rank that a launcher started. Rank 0 creates the run's folder or takes it, and all ranks use it.

    `generation`: None where the launcher is not torchrun."""
    stopping = Stopping.of_process()
    if generation is not None:
        stopping.watch_parent()  # torchrun does not handle each signal that schedulers send: SIGUSR1 ends it
    rank = join_run(spec)
    path, lease = "", None
    try:
        if rank.number == 0:
            folder, lease, spec = take()
            path = json.dumps([lease.epoch, spec.data.revision, str(folder)])
    except PenteractError as e:
        rank.broadcast(f"!{e}")
        raise
    path_of_rank_0 = rank.broadcast(path)
    if path_of_rank_0.startswith("!"):
        raise PeerLost("PEER", "rank 0 could not make the run's folder", found=path_of_rank_0[1:])
    epoch, revision, name = json.loads(path_of_rank_0)
    spec = replace(spec, data=replace(spec.data, revision=revision))
    options = _options([name, f"--epoch={epoch}", *words])[0]

    def final(code: int) -> None:
        if generation is not None:
            generation.leave(code, options.folder)

    def stopped() -> None:
        # Not while it starts: torchrun also sends SIGTERM to ranks when another has failed, and nothing is lost yet.
        if stopping.phase is Phase.WORKING:
            final(Preempted.exit_code)

    def parting() -> None:
        if lease is not None:  # else the next start would wait for a sign of life, where it cannot see this process
            rundir.cancel_resume(options.folder)
            checkpoint_folder.release(options.folder)
            lease.end()

    stopping.before_leaving.append(stopped)
    if lease is not None:
        stopping.before_leaving += [lambda: rundir.cancel_resume(options.folder), lease.end]
    try:
        return work(spec, rank, options, stopping, final, parting)
    finally:
        parting()


def join_run(spec: RunSpec, listener: int | None = None, *, imports: bool = False) -> Rank:
    """Join the other ranks, which must have the same run and data as this one. `imports`: packages of kernels are
    imported from now on."""
    set_up(spec)
    key = take_key(os.environ)
    if imports:
        begin_imports(spec, os.environ)
    facts = {name: value for name, value in run_values(spec).items() if not name.startswith(_OWN)}
    facts |= describe(spec.data.source, spec.tokenizer)
    return join(os.environ, spec.precision.device, facts, spec.limits, listener, key)


def main(argv: list[str]) -> int:
    """Train in the run folder that the arguments name, now or once they come; returns the exit code.

    Rank 0 shares the terminal with the launcher, which prints the error that ended the run. So it prints its own only
    where it could not write it to errors.jsonl; other ranks print into their logs.
    """
    imports_are_done()
    if argv[:1] and argv[0].startswith(ORDERS):
        argv = orders(argv[0])
    options, listener, debug = _options(argv)
    number, earlier = int(os.environ.get("RANK", "0")), rundir.errors_size(options.folder)
    with Stopping.of_process() as stopping, never_fails():
        try:
            spec = resolve(options.folder / (rundir.NEXT if options.resume else rundir.RUN), "").run
            return work(spec, join_run(spec, listener, imports=True), options, stopping, launcher_reports=number == 0)
        except Exception as e:
            error = from_exception(e)
            if debug:
                traceback.print_exc()
            rundir.append_unwatched(options.folder, error, number, e, earlier)
            if number or not rundir.errors(options.folder, earlier):
                print(error, file=sys.stderr, flush=True)
            return error.exit_code


def _options(argv: list[str]) -> tuple[SessionOptions, int | None, bool]:
    """The session's options, the socket of the store, and whether to show tracebacks."""
    parser = argparse.ArgumentParser(prog="penteract.engine.runtime.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--command", default="")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--predicted", type=lambda text: RunPrediction(**json.loads(text)), default=RunPrediction())
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--store-fd", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args(argv)
    options = SessionOptions(
        args.folder, args.compare, args.resume, args.init, args.json, args.predicted, args.epoch,
        args.grace, args.command,
    )  # fmt: skip
    return options, args.store_fd, args.debug


if __name__ == "__main__":
    sys.exit(ends_with(main(sys.argv[1:])))
