"""What a rank leaves for the analysis: a JSON file of its steps, its memory and the ceilings of its device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penteract.measure.profile.trace_events import RecordedStep, Span
from penteract.measure.schemas.profile import Ceilings, MeasuredMemory


@dataclass(slots=True)
class Recording:
    """What one rank measured.

    bare      nanoseconds of each steady step without a profiler
    steps     the profiled ones
    on_device whether kernels run beside the host: on a GPU
    made      device, host, versions
    ceilings  measured on rank 0 alone
    """

    rank: int
    pp_rank: int
    on_device: bool
    made: dict[str, str]
    bare: list[int]
    steps: list[RecordedStep] = field(default_factory=list[RecordedStep])
    memory: MeasuredMemory | None = None
    ceilings: Ceilings | None = None

    def write(self, folder: Path) -> None:
        """Write the file of this rank, whole or not at all."""
        file = path_of(folder, self.rank)
        fresh = file.with_suffix(".tmp")
        fresh.write_text(json.dumps({**asdict(self), "steps": [list(step) for step in self.steps]}))
        fresh.replace(file)

    @staticmethod
    def read(folder: Path, rank: int) -> Recording:
        """Read the file of a rank."""
        row: dict[str, Any] = json.loads(path_of(folder, rank).read_text())
        steps = [RecordedStep(begin, took, [Span(*span) for span in spans]) for begin, took, spans in row.pop("steps")]
        return Recording(steps=steps, **row)


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.json"
