"""A rank's batches in place: tensors are made once and filled for every step, and the host is one batch ahead.

The next batch is drawn while this one is computed, when the totals of the step are put together: its targets are
counted there, so that the next step begins without waiting for any other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from penteract.engine.data import Sample, Samples
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.device import device_of
from penteract.engine.executor.feed import Batch, constants, micro_batch, samples_of, target_counts
from penteract.engine.kernels.checks import check_documents
from penteract.step.program import Program


class Drawn(NamedTuple):
    """This rank's micro-batches of the global batch that begins at sample `first`, on the host, and its targets."""

    samples: Samples
    first: int
    micros: list[list[Sample]]
    counts: list[int]


@dataclass(slots=True)
class Feeder:
    """`batches`: of all micro-batches, the tensors that a program reads, by name."""

    p: Program
    batches: Sequence[Batch]
    drawn: Drawn | None = None  # the next batch, of which all ranks know the targets
    failed: Exception | None = None  # why there is none, where it cannot be drawn

    def feed(self, samples: Samples, first: int) -> list[int] | None:
        """Fill the tensors. -> the targets of this rank's part, unless those of all ranks are known. Where the batch
        could not be drawn, all ranks stop after the step before: what they began meanwhile changes nothing."""
        if self.failed is not None:
            return None
        drawn, self.drawn = self.drawn, None
        known = drawn is not None and drawn.samples is samples and drawn.first == first
        now = drawn if drawn is not None and known else self._draw(samples, first)
        for batch, micro in zip(self.batches, now.micros, strict=True):
            for name, x in micro_batch(self.p, micro, torch.device("cpu")).items():
                there = batch[name]
                there.copy_(device_of(there.device).staged(x), non_blocking=True)
        return None if known else now.counts

    def check(self, samples: Samples, first: int) -> None:
        """Draw a batch for nothing but to see that it can be."""
        self._draw(samples, first)

    def ahead(self, samples: Samples, first: int) -> Callable[[], list[int] | None]:
        """What draws the batch that begins at sample `first` as the next one, and tells its targets; None where it
        `failed`: that is raised once the step is over, as the other ranks are in the middle of it."""
        return partial(self._ahead, samples, first)

    def _ahead(self, samples: Samples, first: int) -> list[int] | None:
        try:
            self.drawn = self._draw(samples, first)
        except Exception as error:
            self.failed = error
            return None
        return self.drawn.counts

    def _draw(self, samples: Samples, first: int) -> Drawn:
        micros = [[samples.sample(i) for i in ids] for ids in samples_of(self.p, first)]
        for micro in micros:
            check_documents(self.p, micro)
        return Drawn(samples, first, micros, target_counts(self.p, micros))


def places(p: Program, device: torch.device) -> list[Batch]:
    """Tensors for all that a step's micro-batches are read from; what never changes is there once."""
    fixed = constants(p, device)
    specs = {name: c.tape.specs[v] for c in p.chunks for name, v in c.tape.inputs.items() if name not in fixed}
    return [
        fixed | {n: torch.zeros(s.shape, dtype=dtype_of(s.role, p.precision), device=device) for n, s in specs.items()}  # type: ignore[arg-type]
        for _ in range(p.layout.gradient_accumulation_steps)
    ]
