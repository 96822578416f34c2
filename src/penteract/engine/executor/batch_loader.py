"""A rank's batches: tensors are allocated once and filled for every step; the host prefetches one batch.

The next batch is prefetched while this one is computed. Its target count is summed over ranks together with the totals
of this step, so the next step begins without waiting for any other rank.
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


class HostBatch(NamedTuple):
    """This rank's micro-batches of the global batch that begins at sample `first`, on the host, and its targets."""

    samples: Samples
    first: int
    micros: list[list[Sample]]
    counts: list[int]


@dataclass(slots=True)
class BatchLoader:
    """Fills `batches`: for each micro-batch, the tensors that a program reads, by name."""

    p: Program
    batches: Sequence[Batch]
    prefetched: HostBatch | None = None  # the next batch; the sum of its targets over all ranks is known
    failed: Exception | None = None  # why the next batch could not be prefetched

    def load(self, samples: Samples, first: int) -> list[int] | None:
        """Fill the tensors with the batch that begins at sample `first`. Returns this rank's target counts; None if the
        batch was prefetched, as the sums over all ranks are then known. If the batch could not be prefetched, all ranks
        stop after the step before, and what they began meanwhile changes nothing."""
        if self.failed is not None:
            return None
        prefetched, self.prefetched = self.prefetched, None
        hit = prefetched is not None and prefetched.samples is samples and prefetched.first == first
        loaded = prefetched if prefetched is not None and hit else self._read(samples, first)
        for batch, micro in zip(self.batches, loaded.micros, strict=True):
            for name, x in micro_batch(self.p, micro, torch.device("cpu")).items():
                out = batch[name]
                out.copy_(device_of(out.device).pin(x), non_blocking=True)
        return None if hit else loaded.counts

    def check(self, samples: Samples, first: int) -> None:
        """Read a batch only to see that it can be read."""
        self._read(samples, first)

    def prefetcher(self, samples: Samples, first: int) -> Callable[[], list[int] | None]:
        """A function that prefetches the batch that begins at sample `first`, and returns this rank's target counts.

        It returns None on an error, and keeps it in `failed`. The caller raises it after the step, because the other
        ranks are in the middle of theirs.
        """
        return partial(self._prefetch, samples, first)

    def _prefetch(self, samples: Samples, first: int) -> list[int] | None:
        try:
            self.prefetched = self._read(samples, first)
        except Exception as error:
            self.failed = error
            return None
        return self.prefetched.counts

    def _read(self, samples: Samples, first: int) -> HostBatch:
        micros = [[samples.sample(i) for i in ids] for ids in samples_of(self.p, first)]
        for micro in micros:
            check_documents(self.p, micro)
        return HostBatch(samples, first, micros, target_counts(self.p, micros))


def allocate_batches(p: Program, device: torch.device) -> list[Batch]:
    """The input tensors of each micro-batch of a step. Micro-batches share the tensors that never change."""
    fixed = constants(p, device)
    specs = {name: c.tape.specs[v] for c in p.chunks for name, v in c.tape.inputs.items() if name not in fixed}
    return [
        fixed | {n: torch.zeros(s.shape, dtype=dtype_of(s.role, p.precision), device=device) for n, s in specs.items()}  # type: ignore[arg-type]
        for _ in range(p.layout.gradient_accumulation_steps)
    ]
