"""Sweeps made of numbers, for tests of what is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penteract.measure.schemas.sweep import (
    CaseMeasurement,
    CasePrediction,
    CaseProvenance,
    CaseResult,
    CaseStatus,
    State,
    Sweep,
    SweepCase,
    SweepRow,
    SweepSettings,
)
from penteract.measure.schemas.sweep_folder import SweepFolder

GIB = 2**30


def case(number: int, *, step_s: float | None = 1.0, limit_s: float = 60.0, ranks: int = 8, **layout: Any) -> SweepCase:
    settings = {"dp": 1, "tp": 1, "pp": 1} | layout
    rate = None if step_s is None else 1024 / step_s / ranks
    return SweepCase(
        name=f"{number:03d}", number=number, origin="grid", varied={f"parallel.{k}": v for k, v in layout.items()},
        model="tiny", parameters=10, layout=settings, layout_text=",".join(f"{k}={v}" for k, v in settings.items()),
        ranks=ranks, limit_s=limit_s, precision="bf16", global_batch_size=8, sequence_length=128, model_flops=1000,
        model_flops_causal=900,
        predicted=CasePrediction(allocated_bytes=10 * GIB, usable_bytes=100 * GIB, step_s=step_s,
                                 tokens_per_s_per_gpu=rate),
    )  # fmt: skip


def result(steps: Sequence[float], one: SweepCase, *, mfu: float | None = None, void: str = "") -> CaseResult:
    step = sorted(steps)[len(steps) // 2]
    return CaseResult(
        attempt=1,
        measured=CaseMeasurement(
            tokens_per_s_per_gpu=one.tokens / step / one.ranks, step_s=step, spread=(max(steps) - min(steps)) / step,
            steps_s=tuple(steps), warmup_s=(9.0,), losses=(3.0, 2.0), loss_falls=True, void=void, mfu=mfu,
            allocated_bytes=(10 * GIB, 11 * GIB),
        ),
        provenance=CaseProvenance(versions={}, commit="abc", device="H200", hosts=("a",), began="", ended=""),
    )  # fmt: skip


def row(one: SweepCase, steps: Sequence[float] = (), state: State = "done", **more: Any) -> SweepRow:
    """A row that took these steps; without steps one that ended in `state`."""
    error = None if steps else {"code": "X", "what": "it broke", "found": "", "allowed": "", "exit_code": 70}
    status = CaseStatus(state=state, attempt=1, losses=2 * (state == "lost"), error=error, gpu_seconds=60.0)
    return SweepRow(case=one, status=status, result=result(steps, one, **more) if steps else None)


def sweep(*rows: SweepRow, budget: float | None = None) -> Sweep:
    settings = SweepSettings(
        name="a sweep", steps=10, warmup=3, limit_s=60.0, data="random", cluster="", command="penteract bench",
        asked="x", cases=tuple(r.case.name for r in rows), budget_gpu_minutes=budget,
    )  # fmt: skip
    return Sweep(settings=settings, rows=rows)


def written(found: Sweep, path: Path) -> SweepFolder:
    """A sweep as a folder, by the writers of `penteract bench`."""
    folder = SweepFolder(path)
    for one in found.rows:
        at = folder.case(one.case.name)
        at.make(one.case, "[parallel]\n")
        if one.result is not None:
            at.write_result(one.result)
        at.write_status(one.status)
    folder.write_settings(found.settings)
    return folder
