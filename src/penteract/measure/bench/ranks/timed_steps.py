"""Steps of one rank: some to warm up, then timed ones, as a training run takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penteract.config.run import RunSpec
from penteract.engine.data import Samples, check_vocabulary, open_samples, open_tokenizer
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.rank import Rank
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.trainer import Trainer
from penteract.measure.bench.ranks.random_samples import RandomSamples
from penteract.measure.bench.ranks.step_ends import StepEnds
from penteract.units import Bytes


@dataclass(slots=True)
class RankMeasurement:
    """What one rank measured. `seconds` and `losses` of all steps; bytes of reserved and device: None on a CPU.

    routed       of each step, the rows that this rank's experts were sent, by layer and then micro-batch
    exact_steps  those that had exact sizes, as copies of tokens did not fit the blocks that ranks send
    """

    seconds: list[float] = field(default_factory=list[float])
    losses: list[float | None] = field(default_factory=list["float | None"])
    allocated: Bytes = 0
    reserved: Bytes | None = None
    device: Bytes | None = None
    routed: list[list[int]] = field(default_factory=list[list[int]])
    exact_steps: list[int] = field(default_factory=list[int])


def samples_of(spec: RunSpec, rank: Rank, data: str) -> Samples:
    """The training samples: random, or those of the run. Raises what opening them raises."""
    if data == "random":
        return RandomSamples(spec.model.vocab_size, spec.sequence_length, spec.train.seed)
    tokenizer = open_tokenizer(spec.tokenizer)
    check_vocabulary(tokenizer, spec.model.vocab_size)
    found = list[Samples]()

    def open_them() -> None:
        cache = Path(spec.out) / "cache"
        found.append(open_samples(spec.data, tokenizer, spec.sequence_length, spec.train.seed, cache)[0])

    rank.first(open_them, spec.limits.data)
    return found[0]


def take_steps(
    spec: RunSpec, rank: Rank, samples: Samples, asked: Callable[[int], None] = lambda number: None
) -> RankMeasurement:
    """All steps of the run. As in training, a device is asked for a step before the one before it is looked at; the
    second is alone, because its memory is measured. `asked(n)` is called when the device has been asked for step n."""
    trainer, made = Trainer.build(spec, rank), RankMeasurement()
    device, size = trainer.run.device, spec.layout.global_batch_size
    under_way, ends = list[Callable[[], Outcome]](), StepEnds(rank.device)
    routed = list[Callable[[], dict[tuple[int, int], int]]]()

    def read() -> None:
        for outcome in under_way:
            loss = outcome().loss
            made.losses.append(loss if math.isfinite(loss) else None)
        under_way.clear()

    with collected_between_steps():
        ends.mark()
        for number in range(1, spec.train.steps + 1):
            rank.progress.begin_step(number, first=number == 1)
            first = (number - 1) * size
            if number == min(2, spec.train.steps):
                read()
                measured, made.allocated = trainer.measured_step(number, samples, first)
                under_way.append(lambda measured=measured: measured)
            else:
                started = trainer.start(number, samples, first)
                if device.behind:
                    read()
                under_way.append(started)
            collect_after(number)
            if not device.behind or number <= 2:
                read()
            ends.mark()
            routed.append(trainer.run.received_later())
            asked(number)
        read()
    made.seconds = ends.seconds()
    made.routed = [[rows for _, rows in sorted(later().items())] for later in routed]
    made.exact_steps = [] if trainer.repeated is None else sorted(trainer.repeated.exact_steps)
    trainer.run.settle_parameters()
    _device_memory(made, rank.device)
    return made


def _device_memory(made: RankMeasurement, at: torch.device) -> None:
    """What the allocator holds, and what is in use on the device, by any process."""
    if at.type == "cuda":
        free, total = torch.cuda.mem_get_info(at)
        made.reserved, made.device = torch.cuda.max_memory_reserved(at), total - free
