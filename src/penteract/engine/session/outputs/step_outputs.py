"""Where the row of a step goes, on rank 0: metrics.jsonl, the table on the terminal, and trackers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penteract.config.files.run_folder import Row
from penteract.config.run import RunSpec
from penteract.engine.rank.rank import Rank
from penteract.engine.session.outputs.display import LiveTable
from penteract.engine.session.outputs.energy import EnergyMeter
from penteract.engine.session.outputs.metrics import MetricsWriter
from penteract.engine.session.outputs.trackers import Trackers, open_trackers


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All of them. `energy` is read here, because here a step has just ended."""

    table: LiveTable
    metrics: MetricsWriter
    trackers: Trackers
    energy: EnergyMeter

    def write(self, row: Row) -> None:
        """A row of metrics. Raises DiskFailure where metrics.jsonl cannot be written; nothing else fails."""
        if (joules := self.energy.used()) is not None:
            row["energy/gpu_j"] = joules
        self.metrics.write(row)
        self.trackers.log(row)
        self.table.step(row)


@contextmanager
def step_outputs(
    spec: RunSpec, rank: Rank, folder: Path, title: str, *, first: int, epoch: int, as_json: bool
) -> Iterator[StepOutputs | None]:
    """Open those of a run that begins at step `first`; None on ranks other than 0."""
    if rank.number:
        yield None
        return
    with (
        LiveTable(spec.train.steps, title, json=as_json) as table,
        MetricsWriter(folder / "metrics.jsonl", resume_at=first - 1, epoch=epoch) as metrics,
    ):
        trackers = open_trackers(spec, folder, first, os.environ.get("WANDB_PROJECT"))
        try:
            yield StepOutputs(table, metrics, trackers, EnergyMeter.of(rank.device))
        except BaseException:
            trackers.close(1.0)  # other ranks wait to be told
            raise
        trackers.close()
