"""TrainedSteps of one rank: bare, and under torch's profiler."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from penteract.engine.data import Samples
from penteract.engine.executor.outcome import Outcome
from penteract.engine.executor.profiled import ProfiledExecutor
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadInput
from penteract.measure.profile.trace_events import RecordedStep, recorded_steps, step_name

WARM, BARE, PROFILED = 3, 10, 3
_READ = "read the outcome"


class TrainedSteps:
    """Trains on, step after step, as a run does: on a GPU an outcome is read when the next step is under way."""

    def __init__(self, trainer: Trainer, samples: Samples) -> None:
        self.trainer, self.samples = trainer, samples
        self.size, self.done = trainer.spec.layout.global_batch_size, 0
        self.pending: Callable[[], Outcome] | None = None
        self.losses: list[float] = []

    def one(self) -> None:
        """The next step."""
        self.done += 1
        began = self.trainer.start(self.done, self.samples, (self.done - 1) * self.size)
        collect_after(self.done)
        if self.trainer.run.device.behind:
            began, self.pending = self.pending, began
        self._read(began)

    def settle(self) -> None:
        """Wait for all that was asked of the device and of the wires: with ZeRO, parameters are gathered beyond a step,
        and a thread of gloo that still notes its copies when torch's profiler stops ends the process (SIGSEGV)."""
        self._read(self.pending)
        self.pending = None
        self.trainer.run.settle_parameters()
        self.trainer.run.device.settle()

    def _read(self, outcome: Callable[[], Outcome] | None) -> None:
        if outcome is not None:
            with record_function(_READ):
                self.losses.append(outcome().loss)
            self._expect_blocks()

    def _expect_blocks(self) -> None:
        """Steps with exact rows are not those that were planned."""
        repeated = self.trainer.repeated
        if repeated is not None and repeated.exact_steps:
            capacity, first = self.trainer.spec.layout.capacity_percent, min(repeated.exact_steps)
            raise BadInput(
                "CAPACITY", "copies of tokens did not fit the blocks of an all-to-all: a profile would be of steps "
                "with exact rows of experts", where=f"step {first}", found=f"blocks of {capacity} %",
                allowed="room for all copies of a step", fix=f"--parallel.capacity_percent {2 * capacity}",
            )  # fmt: skip


def bare(
    steps: TrainedSteps, *, warm: int = WARM, count: int = BARE, barrier: Callable[[], None] = lambda: None
) -> list[int]:
    """Nanoseconds of `count` steady steps."""
    stamps = list[int]()
    with collected_between_steps():
        for i in range(warm + count):
            if i == warm - 1:
                barrier()
            steps.one()
            stamps.append(time.perf_counter_ns())
    stamps = stamps[warm - 1 :]
    return [after - before for before, after in pairwise(stamps)]


def profiled(
    steps: TrainedSteps, *, count: int = PROFILED, warm: int = 1, barrier: Callable[[], None] = lambda: None
) -> list[RecordedStep]:
    """The last `count` of `count` + 1 steps under torch's profiler, after `warm` with names alone."""
    if steps.trainer.rank.device.type == "cpu":  # else each rank prints two lines of the profiler's own marks
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with named(steps.trainer), collected_between_steps():
        for _ in range(warm):
            steps.one()
        barrier()
        with profile(activities=_activities(steps.trainer.rank.device)) as seen:
            first = steps.done + 1
            for number in range(first, first + count + 1):
                with record_function(step_name(number)):
                    steps.one()
            steps.settle()
    return recorded_steps(exported(seen), range(first + 1, first + count + 1))


@contextmanager
def named(trainer: Trainer) -> Generator[None]:
    """TrainedSteps have names for profilers in this context."""
    trainer.observed = ProfiledExecutor
    try:
        yield
    finally:
        trainer.observed = None


def exported(seen: profile) -> dict[str, Any]:
    """What a profiler has seen, as trace events of Chrome."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
