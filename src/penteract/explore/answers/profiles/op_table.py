"""The ops of a pipeline rank in the order of a step, each with its kernels."""

from __future__ import annotations

from penteract.explore.answers.profiles.profile_lanes import kind_of
from penteract.explore.answers.profiles.shown_times import part_of, safe, time_text, timed
from penteract.explore.schemas.profile_schema import OpKernel, ProfiledOp
from penteract.measure.schemas.profile import KernelRow, OpRow, ProfileFile
from penteract.measure.schemas.profile_parts import LABELS
from penteract.units import show_flops, show_whole

_NOTES = {"both": "", "predicted": "not measured", "measured": "not predicted"}
_CEILINGS = {"product": "products", "copy": "copies", "none": ""}


def op_table(profile: ProfileFile, pp_rank: int) -> list[ProfiledOp]:
    """The rows of a pipeline rank."""
    return [_op(i, row) for i, row in enumerate(profile["ops"]) if row["pp_rank"] == pp_rank]


def ops_about(profile: ProfileFile, pp_rank: int) -> str:
    """Whose ops they are, and what "reached" compares with."""
    own, ceilings = [row for row in profile["ops"] if row["pp_rank"] == pp_rank], profile["basis"]["ceilings"]
    whose = f"Pipeline rank {pp_rank}, measured on rank {own[0]['rank']}, the slowest of its GPUs. " if own else ""
    product, copy = show_flops(round(ceilings["product"])), ceilings["copy"] / 1e9
    dtype = safe(ceilings["dtype"])
    return f"{whose}Ceilings, measured right after the step: products of {dtype} {product}/s, copies {copy:.3g} GB/s."


def unmatched_text(profile: ProfileFile) -> str:
    """What only one side has."""
    found = profile["unmatched"]
    return (f"Unmatched: {part_of(found['measured_share'])} of the measured step has no prediction, "
            f"{part_of(found['predicted_share'])} of the predicted step was not measured.")  # fmt: skip


def _op(number: int, row: OpRow) -> ProfiledOp:
    measured, predicted = row["measured"], row["predicted"]
    reached = f"{part_of(row['reached'])} of {_CEILINGS[row['ceiling']]}" if row["reached"] else ""
    skew = f"{time_text(row['least'])} to {time_text(row['most'])} (rank {row['slowest']})"
    return {
        "number": number, "name": safe(row["name"]), "stream": safe(row["stream"]), "kind": kind_of(row["part"]),
        "part": LABELS.get(row["part"], safe(row["part"])), "matched": row["matched"], "note": _NOTES[row["matched"]],
        "calls": show_whole(row["calls"]), "predicted": timed(predicted), "measured": timed(measured),
        "change": time_text(measured - predicted, "+"), "share": part_of(row["share"]), "reached": reached,
        "skew": skew if row["least"] < row["most"] else "", "kernels": [_kernel(one, row) for one in row["kernels"]],
    }  # fmt: skip


def _kernel(kernel: KernelRow, row: OpRow) -> OpKernel:
    whole = max(row["measured"], sum(one["picoseconds"] for one in row["kernels"]))
    return {"name": safe(kernel["name"]), "calls": show_whole(kernel["calls"]), "took": timed(kernel["picoseconds"]),
            "share": part_of(kernel["picoseconds"], whole)}  # fmt: skip
