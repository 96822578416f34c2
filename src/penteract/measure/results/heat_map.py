"""Cells of heat maps over dp × tp × pp: of each mesh its fastest case, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penteract.measure.results.cells import CellCases, cells, short_word
from penteract.measure.schemas.sweep import Sweep, SweepRow
from penteract.units import gib

Metric = Literal["tokens/s per GPU", "memory, GiB", "MFU, %"]
METRICS: tuple[Metric, ...] = ("tokens/s per GPU", "memory, GiB", "MFU, %")


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A mesh of the sweep. `row`: its fastest case, else the first; `values` by metric, empty if no speed counts;
    `word`: what became of it then. `others`: further cases of the same mesh."""

    row: SweepRow
    values: dict[Metric, float]
    word: str
    others: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """`cells[pp, dp, tp]`; the degrees that occur, ascending. `metrics`: those with a value."""

    title: str
    cells: dict[tuple[int, int, int], HeatCell]
    pp: tuple[int, ...]
    dp: tuple[int, ...]
    tp: tuple[int, ...]
    metrics: tuple[Metric, ...]


def heat_map(sweep: Sweep) -> HeatMap:
    """The heat maps of a sweep."""
    found = {mesh: _cell(some) for mesh, some in cells(sweep.rows, _mesh, _speed).items()}
    pp, dp, tp = (tuple(sorted({mesh[i] for mesh in found})) for i in range(3))
    metrics: tuple[Metric, ...] = tuple([m for m in METRICS if any(m in cell.values for cell in found.values())])
    return HeatMap(_title(sweep), found, pp, dp, tp, metrics or METRICS[:1])


def _mesh(row: SweepRow) -> tuple[int, int, int]:
    pp, dp, tp = (int(row.case.layout.get(axis, 1)) for axis in ("pp", "dp", "tp"))
    return pp, dp, tp


def _speed(row: SweepRow) -> float | None:
    return _values(row)["tokens/s per GPU"] if row.counts else None


def _cell(found: CellCases[SweepRow]) -> HeatCell:
    word = "" if found.good else short_word(found.best.status.state)
    return HeatCell(found.best, _values(found.best) if found.good else {}, word, len(found.cases) - 1)


def _values(row: SweepRow) -> dict[Metric, float]:
    """Memory is what is in use on the device, else what tensors allocate: of the fullest rank."""
    if row.result is None:
        return {}
    measured = row.result.measured
    found: dict[Metric, float] = {"tokens/s per GPU": measured.tokens_per_s_per_gpu}
    if memory := measured.device_bytes or measured.allocated_bytes:
        found["memory, GiB"] = gib(max(memory))
    if measured.mfu is not None:
        found["MFU, %"] = 100 * measured.mfu
    return found


def _title(sweep: Sweep) -> str:
    models = dict.fromkeys(row.case.model for row in sweep.rows)
    devices = dict.fromkeys(row.result.provenance.device for row in sweep.rows if row.result)
    return " · ".join((sweep.settings.name, *models, *devices))
