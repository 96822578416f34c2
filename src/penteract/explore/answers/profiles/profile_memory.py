"""Memory of a rank by owner, as it was measured, beside what the plan has for each owner."""

from __future__ import annotations

from penteract.explore.amounts import amount, bytes_axis, change, share
from penteract.explore.answers.profiles.shown_times import safe
from penteract.explore.schemas.page_values import Fact
from penteract.explore.schemas.profile_schema import OwnerMemory, ProfiledMemory
from penteract.measure.schemas.profile import MeasuredMemory, ProfileFile
from penteract.units import show_whole

_LABELS = {
    "parameters": "Parameters", "gradients": "Gradients", "optimizer": "Optimizer", "activations": "Activations",
    "workspace": "Workspace of kernels", "communication": "Communication", "data": "Input data",
    "ring_buffer": "Ring buffers of ZeRO", "other": "Other", "context": "Context of the device", "cached": "Cached",
}  # fmt: skip
_BASES = {
    "storages": "every storage that torch handed out, counted",
    "allocator": "the history of torch's allocator",
}
_LIVE = 12  # rows of registers


def profile_memory(profile: ProfileFile, rank: int) -> ProfiledMemory:
    """The memory of a rank; of the fullest one if this one has none."""
    rows = profile["memory"]
    row = next((one for one in rows if one["rank"] == rank), None) or max(rows, key=lambda one: one["peak"])
    owners = _owners(row)
    most = max((size for one in owners for size in (one["measured"]["bytes"], one["predicted"]["bytes"])), default=0)
    return {
        "rank": row["rank"], "total": amount(row["peak"]), "predicted": amount(row["predicted"]),
        "change": change(row["peak"] - row["predicted"]), "at": safe(row["at"]), "basis": _BASES[row["basis"]],
        "facts": _facts(row), "owners": owners, "planned": "planned" in row,
        "live": [
            {"name": safe(one["name"]), "count": show_whole(one["count"]), "amount": amount(one["bytes"]),
             "share": share(one["bytes"], row["peak"])}
            for one in row["live"][:_LIVE]
        ],
        "axis": bytes_axis(most, 0)[0],
    }  # fmt: skip


def _owners(row: MeasuredMemory) -> list[OwnerMemory]:
    """Owners of tensors, the largest first; then what the process has beside them."""
    planned, measured = row.get("planned", {}), row["owners"]
    names = sorted({*measured, *planned}, key=lambda name: (-measured.get(name, 0), -planned.get(name, 0), name))
    found = [_owner(name, measured.get(name, 0), planned.get(name, 0)) for name in names]
    return found + [_owner(name, size, 0, process=True) for name, size in row["process"].items()]


def _owner(name: str, measured: int, planned: int, *, process: bool = False) -> OwnerMemory:
    return {"name": safe(name), "label": _LABELS.get(name, safe(name).capitalize()), "measured": amount(measured),
            "predicted": amount(planned), "change": change(measured - planned), "process": process}  # fmt: skip


def _facts(row: MeasuredMemory) -> list[Fact]:
    """Totals that the device and its allocator know."""
    totals = (("Reserved", row["reserved"], "what torch's allocator took from the device"),
             ("In use on the device", row["device"], "all that the device has in use"))  # fmt: skip
    return [{"label": label, "text": amount(size)["text"], "source": source} for label, size, source in totals if size]
