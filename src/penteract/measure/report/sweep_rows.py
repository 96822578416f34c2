"""Rows of the folders of sweeps: each case that was measured, planned again today from its run file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.measure.report.accuracy_row import AccuracyRow, Amounts
from penteract.measure.report.measured_routing import AS_ROUTED, as_routed
from penteract.measure.report.own_records import ClusterOf
from penteract.measure.schemas.sweep import CaseMeasurement
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.readings.composed import Composer
from penteract.readings.estimator import Estimator
from penteract.units import GIB


def sweep_rows(folder: Path, cluster_of: ClusterOf = cluster) -> Iterator[AccuracyRow]:
    """The cases that are done. Without a cluster (on CPUs) memory alone is predicted; a void case has no time.

    Raises BadInput or CorruptData for what is no sweep.
    """
    sweep = SweepFolder(folder)
    for row in sweep.read().rows:
        if row.result is None or row.status.state != "done":
            continue
        found = resolve(sweep.case(row.case.name).run_file, "", world=row.case.ranks).run
        kinds, policy = found.optimizer.optimizer_kinds, found.precision.policy
        gpus, estimator = sweep.read().settings.cluster, None
        if gpus:
            estimator = Estimator(found.model, cluster_of(gpus), found.sequence_length, policy, kinds)
            predicted = Amounts.of(estimator, found.layout)
        else:
            composer = Composer(found.model, found.sequence_length, policy, kinds)
            pp_ranks = [composer.rank(found.layout, pp_rank).allocated for pp_rank in range(found.layout.pp)]
            predicted = Amounts(allocated=max(pp_ranks) / GIB)
        group, measured = f"sweep {folder.resolve().name}", row.result.measured
        yield AccuracyRow(group=group, name=row.case.name, predicted=predicted, measured=_measured(measured))
        if measured.routed_rows:
            rows = measured.routed_rows[measured.fullest]
            predicted = as_routed(estimator, found, measured.fullest, rows, measured.imbalance)
            yield AccuracyRow(
                group=group, name=row.case.name + AS_ROUTED, predicted=predicted,
                measured=replace(_measured(measured), reserved=None, device=None),
            )  # fmt: skip


def _measured(found: CaseMeasurement) -> Amounts:
    def largest(each: tuple[int, ...]) -> float | None:
        return max(each) / GIB if each else None

    return Amounts(
        allocated=largest(found.allocated_bytes), reserved=largest(found.reserved_bytes),
        device=largest(found.device_bytes), step=None if found.void else 1e3 * found.step_s,
    )  # fmt: skip
