"""The process of one rank that is profiled: `python -m penteract.measure.profile.record.profiled_rank FOLDER …`."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from penteract._version import __version__
from penteract.config.mesh import Mesh
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.data import Samples, check_vocabulary, open_samples, open_tokenizer
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank, join
from penteract.engine.rank.run_key import take_key
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.printing import never_fails
from penteract.engine.runtime.watch import watched
from penteract.engine.session.session import set_up
from penteract.engine.session.trainer import Trainer
from penteract.errors import PenteractError
from penteract.measure.profile.record.allocator_history import in_use, measured_on_gpu
from penteract.measure.profile.record.ceilings import ceilings
from penteract.measure.profile.record.owned_storages import measured_on_host
from penteract.measure.profile.record.short_calibration import calibrate_shortly
from penteract.measure.profile.record.steps import BARE, PROFILED, WARM, TrainedSteps, bare, profiled
from penteract.measure.profile.recording import Recording

STEPS = WARM + BARE + PROFILED + 2 + 2 + 1  # all that a profile trains, and one more that is never asked for


def record(
    spec: RunSpec,
    rank: Rank,
    folder: Path,
    stopping: Stopping,
    *,
    init: Path | None = None,
    calibrate: bool = False,
    quiet: bool = False,
) -> None:
    """Measure on this rank, and leave its recording in the folder. `init`: weights to start from. `calibrate`: write a
    hardware file of this device too, where the catalogue has none. `quiet`: do not say what is measured."""

    def announce(what: str) -> None:
        """What is measured next: on a CPU, parts take minutes."""
        if rank.number == 0 and not quiet:
            print(f"profile: {what} …", file=sys.stderr, flush=True)

    with watched(rank, folder, stopping, launcher_reports=True):
        stopping.enter(Phase.MEASURING, str(folder))
        spec = replace(spec, train=replace(spec.train, steps=max(STEPS, spec.train.steps)))
        gpu = rank.device.type == "cuda"
        context = in_use(rank.device) if gpu else 0
        samples = open_data(spec, rank)
        steps = TrainedSteps(Trainer.build(spec, rank, init), samples)
        pp_rank = Mesh(spec.layout).coordinates(rank.number)["pp"]
        made = about(rank)
        announce(f"{WARM + BARE} steps, of which the last {BARE} are timed")
        took = bare(steps, barrier=rank.barrier)
        found = Recording(rank.number, pp_rank, gpu, made, took)
        announce(f"{PROFILED} steps under torch's profiler")
        found.steps = profiled(steps, barrier=rank.barrier)
        announce("the memory of a step")
        found.memory = measured_on_gpu(steps, pp_rank, context) if gpu else measured_on_host(steps, pp_rank)
        steps.trainer.run.settle_parameters()
        rank.barrier()
        if rank.number == 0:  # the others wait
            announce("what this device reaches at most")
            found.ceilings = ceilings(rank.device, spec.precision.policy)
            if calibrate:
                calibrate_shortly(folder, rank.device, spec.precision.policy.products)
        found.write(folder)
        rank.barrier()
    rank.leave()


def joined(
    spec: RunSpec,
    make: Callable[[], None],
    folder: Path,
    *,
    init: Path | None = None,
    calibrate: bool = False,
    quiet: bool = False,
) -> Path:
    """Measure as a rank that a launcher started; returns the folder, which rank 0 makes and all use."""
    stopping = Stopping.of_process()
    set_up(spec)
    rank = join(os.environ, spec.precision.device, {}, spec.limits, None, take_key(os.environ))
    path, failed = "", None
    if rank.number == 0:
        try:
            make()
            path = str(folder.absolute())
        except PenteractError as error:
            failed = error
    if (error := rank.one_of(failed)) is not None:
        raise error
    shared = Path(rank.broadcast(path))
    record(spec, rank, shared, stopping, init=init, calibrate=calibrate, quiet=quiet)
    return shared


def open_data(spec: RunSpec, rank: Rank) -> Samples:
    """The run's own samples."""
    tokenizer = open_tokenizer(spec.tokenizer)
    check_vocabulary(tokenizer, spec.model.vocab_size)
    found = list[Samples]()

    def open_them() -> None:
        found.append(open_samples(spec.data, tokenizer, spec.sequence_length, spec.train.seed,
                                  Path(spec.out) / "cache")[0])  # fmt: skip

    rank.first(open_them, spec.limits.data)
    return found[0]


def about(rank: Rank) -> dict[str, str]:
    """Where, when and by which versions."""
    device = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else platform.processor() or "CPU"
    return {
        "device": device, "host": socket.gethostname(), "date": time.strftime("%Y-%m-%d"), "penteract": __version__,
        "torch": torch.__version__, "threads": str(torch.get_num_threads()),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure in the folder that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penteract.measure.profile.record.profiled_rank")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--store-fd", type=int)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    number = int(os.environ.get("RANK", "0"))
    with Stopping.of_process() as stopping, never_fails():
        try:
            spec = resolve(args.folder / rundir.RUN, "").run
            set_up(spec)
            rank = join(os.environ, spec.precision.device, {}, spec.limits, args.store_fd, take_key(os.environ))
            record(spec, rank, args.folder, stopping, init=args.init, calibrate=args.calibrate, quiet=args.quiet)
        except Exception as e:
            error = from_exception(e)
            if args.debug:
                traceback.print_exc()
            rundir.append_unwatched(args.folder, error, number, e)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
