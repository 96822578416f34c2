"""Cells of heat maps over dp × tp × pp: of each mesh its fastest case, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penteract.measure.schemas.sweep import Sweep, SweepRow
from penteract.units import gib

Metric = Literal["tokens/s per GPU", "memory, GiB", "MFU, %"]
METRICS: tuple[Metric, ...] = ("tokens/s per GPU", "memory, GiB", "MFU, %")
_WORDS = {"out of memory": "OOM", "timed out": "time", "done": "void", "skipped": "too big"}  # short, for a cell


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
    meshes = dict[tuple[int, int, int], list[SweepRow]]()
    for row in sweep.rows:
        pp, dp, tp = (int(row.case.layout.get(axis, 1)) for axis in ("pp", "dp", "tp"))
        meshes.setdefault((pp, dp, tp), []).append(row)
    cells = {mesh: _cell(rows) for mesh, rows in meshes.items()}
    pp, dp, tp = (tuple(sorted({mesh[i] for mesh in cells})) for i in range(3))
    metrics: tuple[Metric, ...] = tuple([m for m in METRICS if any(m in cell.values for cell in cells.values())])
    return HeatMap(_title(sweep), cells, pp, dp, tp, metrics or METRICS[:1])


def _cell(rows: list[SweepRow]) -> HeatCell:
    good = sorted((row for row in rows if row.counts), key=lambda row: -_values(row)["tokens/s per GPU"])
    row = good[0] if good else rows[0]
    word = "" if good else _WORDS.get(row.status.state, row.status.state)
    return HeatCell(row, _values(row) if good else {}, word, len(rows) - 1)


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
