"""A validation of fewer samples than a batch: each counts once, so its mean is that of any layout and any batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from layouts import CPU
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.data.pack import DocumentPacking, Sample, WindowSamples
from penteract.engine.data.tokens import TokenStream
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.trainer import Trainer
from pool import Pool
from tolerances import MEAN

LENGTH, WINDOWS, END = 32, 3, 256
SMALL = (f"batch.sequence_length={LENGTH}", "precision.dtype=fp32", "precision.device=cpu", "model.layers=2")


class Few(WindowSamples):
    """Three windows of unlike numbers of targets. Notes which were read."""

    def __init__(self) -> None:
        ids = np.random.default_rng(0).integers(0, END, LENGTH * WINDOWS + 1).astype(np.uint16)
        ids[LENGTH : 2 * LENGTH : 3] = END  # a third of the second has no target
        super().__init__(TokenStream((ids,), END + 1), DocumentPacking(LENGTH, END), 0, one_order=True)
        self.read = Counter[int]()

    def sample(self, index: int) -> Sample:
        self.read[index] += 1
        return super().sample(index)


def run_of(batch: int, *more: str) -> RunSpec:
    return resolve(None, "tiny", [*SMALL, f"batch.global_batch_size={batch}", *more]).run


def validated(rank: int, groups: ProcessGroups, layout: Layout, run: RunSpec) -> float:
    """The mean, at the weights of the seed."""
    trainer = Trainer.build(run, Rank(rank, layout.world, CPU, None, RankProgress(run.limits)))
    return trainer.validate(Few())


@pytest.fixture(scope="module")
def alone() -> float:
    """Window by window, in batches of one."""
    run, samples = run_of(1), Few()
    assert len(samples) == WINDOWS
    trainer = Trainer.build(run, Rank(0, 1, CPU, None))
    mean = trainer.validate(samples)
    assert samples.read == {0: 1, 1: 1, 2: 1}
    return mean


@pytest.mark.parametrize(
    "words",
    [
        ("batch.micro_batch_size=8",), ("batch.micro_batch_size=2",), ("parallel.dp=2", "batch.micro_batch_size=2"),
        ("parallel.dp=4", "batch.micro_batch_size=1"), ("parallel.dp=4", "parallel.zero=3", "batch.micro_batch_size=2"),
        ("parallel.tp=2", "batch.micro_batch_size=4"), ("parallel.cp=2", "batch.micro_batch_size=1"),
        ("parallel.pp=2", "batch.micro_batch_size=2"), ("batch.micro_batch_size=4", "kernels.loss=chunked"),
    ],
    ids=lambda words: " ".join(word.partition(".")[2] for word in words),
)  # fmt: skip
def test_each_window_counts_once(pool: Pool, alone: float, words: tuple[str, ...]) -> None:
    run = run_of(8, *words)
    for mean in pool.run(validated, run.layout, run):
        assert mean == pytest.approx(alone, rel=MEAN)
    run = run_of(16, *words)  # 3:3:2 would be 6:5:5
    assert pool.run(validated, run.layout, run)[0] == pytest.approx(alone, rel=MEAN)


def test_an_epoch_of_training_is_still_followed_by_another() -> None:
    run, samples = run_of(4), Few()
    trainer = Trainer.build(run, Rank(0, 1, CPU, None))
    assert trainer.loader.load(samples, 0) == [sum(int((samples.sample(i).targets >= 0).sum()) for i in range(4))]
