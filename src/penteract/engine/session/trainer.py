"""One rank's trainer: a compiled step, its state, and the batches that feed it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penteract.config.run import RunSpec
from penteract.engine.comm.comm import Comm
from penteract.engine.comm.groups import direct_rounds
from penteract.engine.data import Samples
from penteract.engine.device.device import Device, device_of
from penteract.engine.executor.allocator import Arena, Spare
from penteract.engine.executor.batch_loader import BatchLoader, HostBatch, allocate_micro_batches
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.executor.outcome import Outcome
from penteract.engine.executor.repeated_steps import RepeatedSteps
from penteract.engine.hf.weights import open_weights, start_from
from penteract.engine.kernels.checks import check_kernels
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.registry import Target, TargetHere, import_packages, kernels
from penteract.engine.optim.muon import FusedPasses, Muon
from penteract.engine.optim.optimizer import AdamW, UpdateShard
from penteract.engine.rank.rank import Rank
from penteract.engine.session.concurrently import concurrently
from penteract.engine.state.state import TrainingState, allocate
from penteract.errors import BadNumerics
from penteract.step.arena import plan_arena
from penteract.step.learning_rate import rate
from penteract.step.program import Program, compile_run
from penteract.step.walk import walk, walk_forward

log = logging.getLogger("penteract")


@dataclass(frozen=True, slots=True)
class Place:
    """What a trainer runs on.

    kernels          those of a program there
    initialise       fills parameters from a seed
    import_packages  imports what the kernels of a program need, which takes seconds
    """

    device: Device
    target: Target
    kernels: Callable[[Program], dict[str, TorchKernel]]
    initialise: Callable[[Program, TrainingState, int], None] = initialise
    import_packages: Callable[[Program], None] = lambda _: None

    @staticmethod
    def here(rank: Rank) -> Place:
        """The device of a rank."""
        at = rank.device
        return Place(
            device_of(at),
            TargetHere(at),
            lambda p: kernels(p, at),
            import_packages=lambda p: import_packages(p, at),
        )


@dataclass(slots=True)
class Trainer:
    """`step(n)` trains on batch n; `validate()` evaluates; both use the same state."""

    spec: RunSpec
    rank: Rank
    program: Program
    state: TrainingState
    run: Executor
    validation_run: Executor
    loader: BatchLoader
    validation_loader: BatchLoader  # fills the same tensors as `loader`, never at the same time
    observed: Callable[[Executor], Any] | None = None  # makes the reading that steps walk in place of the run itself
    repeated: RepeatedSteps | None = None  # where copies of tokens may not fit the blocks that ranks send

    @staticmethod
    def build(spec: RunSpec, rank: Rank, init: Path | None = None) -> Trainer:
        """Compile and allocate; initialise from the weights at `init`, or from the seed."""
        return Trainer.on(spec, rank, Place.here(rank), init)

    @staticmethod
    def on(spec: RunSpec, rank: Rank, place: Place, init: Path | None = None) -> Trainer:
        """The same, at another place: `penteract rehearse` has one without peers and numbers."""
        precision, device = spec.precision.policy, place.device
        program = compile_run(spec, rank.number)
        check_kernels(program, place.target, packed=spec.data.pack_documents)
        comm = device.comm(rank.number, rank.progress.journal, spec.limits.collective)
        with concurrently(lambda: place.import_packages(program)):
            comm.open(program)
            state = allocate(program, rank.device)
            if init is not None:
                start_from(open_weights(init, program), program, state)
            else:
                place.initialise(program, state, spec.train.seed)
        plan = plan_arena(program)
        block = None
        if program.layout.reads_directly:
            block = comm.share(plan.size, direct_rounds(program, rank.per_host), device.peer_memory)
        memory = Arena(plan, precision, rank.device, block)
        optimizer = _optimizer(spec, rank, state, comm)
        run = Executor(program, state, comm, place.kernels(program), memory, optimizer, fake=device)
        forward = compile_run(spec, rank.number, training=False)
        # Training and validation never run at once, so their arenas share one block.
        validation_memory = Arena(plan_arena(forward, training=False), precision, rank.device, memory.block)
        validation_run = Executor(forward, state, comm, place.kernels(forward), validation_memory, fake=device)
        run.on_action = validation_run.on_action = rank.progress.did
        run.micro_batches = validation_run.micro_batches = allocate_micro_batches(program, rank.device)
        loaders = BatchLoader(program, run.micro_batches), BatchLoader(forward, run.micro_batches, once=True)
        trainer = Trainer(spec, rank, program, state, run, validation_run, *loaders)
        if program.layout.sends_blocks:
            trainer.repeated, trainer.loader.keeps = _repeated_steps(spec, rank, place, run, memory.block), True
        return trainer

    def step(self, number: int, samples: Samples, first: int) -> Outcome:
        """Optimizer step `number`, from 1, on the global batch that begins at sample `first`."""
        return self.start(number, samples, first)()

    def start(self, number: int, samples: Samples, first: int) -> Callable[[], Outcome]:
        """Ask the device for a step. -> what waits for its outcome: a GPU need not wait for the host meanwhile."""
        if self.repeated is not None:
            return self.repeated.start(self, number, samples, first)
        return self.ask(number, samples, first)

    def ask(
        self, number: int, samples: Samples, first: int, exact: Executor | None = None, again: HostBatch | None = None
    ) -> Callable[[], Outcome]:
        """The step itself; `exact`: by another executor with the state and the numbers of `run`; `again`: repeated with
        this batch, without one ahead."""
        run, loader, progress = exact or self.run, self.loader, self.rank.progress
        assert run.optimizer is not None
        run.optimizer.rate.fill_(self.rate(number))
        run.optimizer.step.fill_(number)
        counts = loader.put(again) if again is not None else progress.reading(lambda: loader.load(samples, first))
        if counts is not None:
            run.counts.copy_(torch.tensor(counts))
        if again is not None or number == self.spec.train.steps:
            run.summed.next_targets = None
        else:
            prefetch = loader.prefetch_task(samples, first + self.spec.layout.global_batch_size)
            run.summed.next_targets = partial(progress.reading, prefetch)
        if exact is not None:
            exact.before_update = self.run.before_update  # state may still be copied for a save
        compiles = exact is not None and not exact.registers.step_complete
        with progress.during("step", "compile") if compiles else nullcontext():
            walk(run.p, self._reading(run), targets_counted=counts is None)
        return self._outcome(run)

    def _reading(self, run: Executor) -> Any:
        """What walks a step of a run."""
        return run if self.observed is None else self.observed(run)

    def weights_are_finite(self) -> bool:
        """Whether all updates have made finite weights of this rank's shards."""
        assert self.run.optimizer is not None
        return math.isfinite(self.run.optimizer.nonfinite.item())

    def check_unreplicated(self, number: int) -> None:
        """Raise BadNumerics if state that only this rank holds changed by itself before the update of a step."""
        if math.isnan(self.run.check.bad.item()):
            raise BadNumerics(
                "REPLICAS",
                f"state changed by itself before the update of step {number}: nothing is saved",
                where=f"rank {self.rank.number}",
                fix="look at the memory of this device; --resume continues from the last checkpoint",
            )

    def rate(self, number: int) -> float:
        """The learning rate of a step."""
        return rate(self.spec.lr_schedule, self.spec.optimizer.learning_rate, number, self.spec.train.steps)

    def validate(self, samples: Samples) -> float:
        """Mean cross entropy of the first validation samples, nats a token. Of fewer than a batch each counts once, so
        the mean depends on no layout's batch."""
        total, tokens = 0.0, 0
        self.run.settle_parameters()
        for first in self._validation_samples(samples):
            counts = self.rank.progress.reading(lambda first=first: self.validation_loader.load(samples, first))
            self.validation_run.counts.copy_(torch.tensor(counts))
            walk_forward(self.validation_run.p, self.validation_run)
            count = int(self.validation_run.counts[0])
            total, tokens = total + self._outcome(self.validation_run)().loss * count, tokens + count
        return total / max(1, tokens)

    def check_validation(self, samples: Samples) -> None:
        """Check the validation samples before the first step, because an error later would lose training. Raises what
        loading them raises."""
        for first in self.rank.progress.over(self._validation_samples(samples)):
            self.validation_loader.check_readable(samples, first)

    def _validation_samples(self, samples: Samples) -> range:
        """The first sample of each validation batch."""
        size = self.spec.layout.global_batch_size
        return range(0, size * min(self.spec.train.validation_batches, max(1, len(samples) // size)), size)

    def measured_step(self, number: int, samples: Samples, first: int) -> tuple[Outcome, int]:
        """`step`, and the peak bytes of tensors on this rank during it."""

        def resident() -> Iterator[torch.Tensor]:
            yield from (*self.state.resident(), *self.run.memory.resident())
            yield from (t for batch in self.run.micro_batches for t in batch.values())

        return self.run.device.peak(lambda: self.step(number, samples, first), resident)

    def _outcome(self, run: Executor) -> Callable[[], Outcome]:
        scaling, terms = run.state.scaling, run.p.losses
        totals = run.totals if scaling is None else torch.cat([run.totals, scaling.used.view(1)])  # one look at both
        numbers = run.device.read(totals)

        def outcome() -> Outcome:
            norm, *rest = numbers()
            scale = rest.pop() if scaling is not None else 0.0
            stop = rest.pop()
            losses = dict(zip(terms, rest, strict=True))
            return Outcome(losses.pop("cross_entropy"), losses, norm**0.5, stop > 0, scale, math.isnan(stop))

        return outcome


def _repeated_steps(spec: RunSpec, rank: Rank, place: Place, run: Executor, room: torch.Tensor) -> RepeatedSteps:
    """Steps of a run that sends blocks; those that are repeated have exact sizes, on the same state. `room`: the memory
    of its registers, in which theirs lie: neither holds anything between steps."""
    program = compile_run(replace(spec, layout=spec.layout.put(expert_rows="exact")), rank.number)
    assert program.buckets == run.p.buckets, "the state of another program"
    check_kernels(program, place.target, packed=spec.data.pack_documents)
    plan = plan_arena(program)
    memory = Arena(plan, program.precision, rank.device, room, spare=Spare.of(room, plan.size))
    exact = Executor(program, run.state, run.comm, place.kernels(program), memory, run.optimizer, fake=place.device,
                     shared_with=run)  # fmt: skip
    exact.on_action, exact.micro_batches = run.on_action, run.micro_batches

    def warn(number: int, more: int) -> None:
        if rank.number == 0:
            after = "the next step has" if more == 1 else f"the next {more} steps have"
            log.warning("step %d was repeated with exact rows of experts, as copies did not fit blocks of %d %%; %s "
                        "exact rows, too", number, spec.layout.capacity_percent, after)  # fmt: skip

    return RepeatedSteps(exact, warn)


def _optimizer(spec: RunSpec, rank: Rank, state: TrainingState, comm: Comm) -> AdamW:
    kernel, passes = _kernels(spec)
    args = (spec.optimizer, rank.device, spec.train.seed, state.scaling, kernel)
    if spec.optimizer.kind != "muon":
        return AdamW(*args)
    return Muon(*args, comm=comm, policy=spec.precision.policy, passes=passes)


def _kernels(spec: RunSpec) -> tuple[UpdateShard, FusedPasses] | tuple[None, None]:
    """The fused kernels of updates, AdamW's and Muon's; None for plain torch. Triton comes with torch builds for GPUs,
    so it is imported only for layouts that use it."""
    if spec.layout.elementwise == "reference":
        return None, None
    from penteract.engine.optim.matrix_update import MatrixUpdate
    from penteract.engine.optim.shard_update import Update

    return Update(spec.optimizer, spec.train.seed), MatrixUpdate(spec.optimizer, spec.train.seed)


def sampling_layout(spec: RunSpec) -> RunSpec:
    """The run with one sequence per data-parallel rank, for writing text."""
    lay = replace(spec.layout, micro_batch_size=1, gradient_accumulation_steps=1)
    return replace(spec, layout=lay)
