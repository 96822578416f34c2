"""A rank's batches: tensors are allocated once and filled for every step; the host prefetches one batch.

The next batch is prefetched while this one is computed. Its target count is summed over ranks together with the totals
of this step, so the next step begins without waiting for any other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from penteract.engine.data import Sample, Samples
from penteract.engine.data.pack import IGNORED
from penteract.engine.device.device import device_of
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.feed import MicroBatch, constants, micro_batch, samples_of, target_counts
from penteract.engine.kernels.checks import check_documents
from penteract.step.program import Program


def allocate_micro_batches(program: Program, device: torch.device) -> list[MicroBatch]:
    """The input tensors of each micro-batch of a step. Micro-batches share the tensors that never change."""
    fixed = constants(program, device)
    specs = {name: c.tape.specs[v] for c in program.chunks for name, v in c.tape.inputs.items() if name not in fixed}
    return [
        fixed
        | {n: torch.zeros(s.shape, dtype=dtype_of(s.role, program.precision), device=device) for n, s in specs.items()}  # type: ignore[arg-type]
        for _ in range(program.layout.gradient_accumulation_steps)
    ]


class HostBatch(NamedTuple):
    """This rank's part of the global batch that begins at sample `first_sample`, on the host: the tensors of each
    micro-batch, and its targets that are not ignored, one count for each loss term."""

    samples: Samples
    first_sample: int
    micro_batches: list[MicroBatch]
    target_counts: list[int]


@dataclass(slots=True)
class BatchLoader:
    """Fills `micro_batches`: for each, the tensors that a program reads, by name."""

    program: Program
    micro_batches: Sequence[MicroBatch]
    prefetched: HostBatch | None = None  # the next batch; the sum of its targets over all ranks is known
    failed: Exception | None = None  # why the next batch could not be prefetched
    keeps: bool = False  # whether the batch is kept that was loaded last, for a step that is repeated
    last: HostBatch | None = None
    once: bool = False  # whether targets of samples beyond the last are ignored: they come again, to fill a batch

    def load(self, samples: Samples, first_sample: int) -> list[int] | None:
        """Copy the batch into the device tensors. Returns this rank's unmasked-label counts, one per loss term (to be
        summed over ranks), or None if they were summed already with the previous step. After a failed prefetch it
        copies nothing; the step that follows is discarded and the error raised."""
        if self.failed is not None:
            return None
        prefetched, self.prefetched = self.prefetched, None
        hit = prefetched is not None and prefetched.samples is samples and prefetched.first_sample == first_sample
        loaded = prefetched if prefetched is not None and hit else self._read(samples, first_sample)
        self.last = loaded if self.keeps else None
        counts = self.put(loaded)
        return None if hit else counts

    def put(self, batch: HostBatch) -> list[int]:
        """Copy a batch into the device tensors. -> this rank's target counts"""
        for tensors, on_host in zip(self.micro_batches, batch.micro_batches, strict=True):
            for name, x in on_host.items():
                # Asynchronous from a temporary tensor: torch's pinned allocator reuses its memory only after the copy.
                tensors[name].copy_(x, non_blocking=True)
        return batch.target_counts

    def check_readable(self, samples: Samples, first_sample: int) -> None:
        """Read a batch only to see that it can be read."""
        self._samples(samples, first_sample)

    def prefetch_task(self, samples: Samples, first_sample: int) -> Callable[[], list[int] | None]:
        """A function that prefetches the batch that begins at sample `first_sample`, and returns this rank's target
        counts.

        It returns None on an error, and keeps it in `failed`. The caller raises it after the step, because the other
        ranks are in the middle of theirs.
        """
        return partial(self._prefetch, samples, first_sample)

    def _prefetch(self, samples: Samples, first_sample: int) -> list[int] | None:
        try:
            self.prefetched = self._read(samples, first_sample)
        except Exception as error:
            self.failed = error
            return None
        return self.prefetched.target_counts

    def _read(self, samples: Samples, first_sample: int) -> HostBatch:
        """Everything that the host has to do for a batch, so that a step that was prefetched begins with copies."""
        by_micro_batch = self._samples(samples, first_sample)
        made = list[MicroBatch]()
        for own_samples, tensors in zip(by_micro_batch, self.micro_batches, strict=True):
            on_host = micro_batch(self.program, own_samples, torch.device("cpu"))
            made.append({name: device_of(tensors[name].device).pin(x) for name, x in on_host.items()})
        return HostBatch(samples, first_sample, made, target_counts(self.program, by_micro_batch))

    def _samples(self, samples: Samples, first_sample: int) -> list[list[Sample]]:
        """The samples of each micro-batch, whose documents this program's kernels can compute."""
        by_micro_batch = [[self._sample(samples, i) for i in ids] for ids in samples_of(self.program, first_sample)]
        for own_samples in by_micro_batch:
            check_documents(self.program, own_samples)
        return by_micro_batch

    def _sample(self, samples: Samples, index: int) -> Sample:
        found = samples.sample(index)
        if not self.once or index < len(samples):
            return found
        return replace(found, targets=np.full_like(found.targets, IGNORED))
