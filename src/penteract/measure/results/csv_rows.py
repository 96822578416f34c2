"""A sweep as a table of comma-separated values: one line a case, whatever became of it."""

from __future__ import annotations

import csv
import io
from typing import Any

from penteract.config.rules.case import KEYS
from penteract.measure.schemas.sweep import Sweep, SweepCase, SweepRow


def to_csv(sweep: Sweep) -> str:
    """All cases in the sweep's order. Bytes are of the fullest rank; what is not known is empty."""
    rows = [flat_row(row) for row in sweep.rows]
    settings = list(dict.fromkeys(setting for row in sweep.rows for setting in row.case.layout))
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in settings]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names[:4], *settings, *names[4:]], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flat_row(row: SweepRow) -> dict[str, Any]:
    """A case's line, by column; empty: not known. Keys that vary and are no part of a layout have columns too."""
    case, status, predicted = row.case, row.status, row.case.predicted
    found: dict[str, Any] = {
        "case": case.name, "state": status.state, "model": case.model, "ranks": case.ranks, **case.layout,
        "layout": case.layout_text, "precision": case.precision, "global_batch_size": case.global_batch_size,
        "sequence_length": case.sequence_length, **_other_keys(case), "predicted_step_s": predicted.step_s,
        "predicted_tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu, "predicted_mfu": predicted.mfu,
        "predicted_allocated_bytes": predicted.allocated_bytes, "predicted_reserved_bytes": predicted.reserved_bytes,
        "predicted_device_bytes": predicted.device_bytes, "gpu_seconds": round(status.gpu_seconds, 3),
        "error": status.error["what"] if status.error else "",
    }  # fmt: skip
    if row.result is not None:
        measured, source = row.result.measured, row.result.provenance
        found |= {
            "step_s": measured.step_s, "spread": measured.spread, "steps": len(measured.steps_s),
            "tokens_per_s_per_gpu": measured.tokens_per_s_per_gpu, "mfu": measured.mfu,
            "mfu_causal": measured.mfu_causal, "allocated_bytes": max(measured.allocated_bytes, default=""),
            "reserved_bytes": max(measured.reserved_bytes, default=""),
            "device_bytes": max(measured.device_bytes, default=""), "loss_first": measured.losses[0],
            "loss_last": measured.losses[-1], "loss_falls": measured.loss_falls, "void": measured.void,
            "imbalance": measured.imbalance if measured.routed_rows else None,
            "device": source.device, "commit": source.commit, "ended": source.ended,
        }  # fmt: skip
    return {name: "" if value is None else value for name, value in found.items()}


def _other_keys(case: SweepCase) -> dict[str, Any]:
    """What varies besides the layout, by the keys of run files."""
    return {key: value for key, value in case.varied.items() if key not in KEYS.values()}
