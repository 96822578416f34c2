"""The memory of a GPU's step, by the history that torch's allocator keeps. No GPU has run this yet: what it reads is
tried on recorded histories (`tests/measure/test_profile_memory.py`)."""

from __future__ import annotations

import time
from typing import Any

import torch

from penteract.measure.profile.allocator_events import AllocatorNotes, history_peak
from penteract.measure.profile.record.owned_storages import OwnedRun, Ownership, one_storage_each, residents
from penteract.measure.profile.record.steps import TrainedSteps
from penteract.measure.schemas.profile import MeasuredMemory

_MOST_EVENTS = 2_000_000


def in_use(device: torch.device) -> int:
    """Bytes of a GPU that are in use, by whatever process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measured_on_gpu(steps: TrainedSteps, pp_rank: int, context: int) -> MeasuredMemory:
    """The memory of a GPU's step. `context`: bytes of the device in use before anything was allocated."""
    device, notes = steps.trainer.rank.device, AllocatorNotes()
    ownership = Ownership(lambda owner, name: notes.event(time.time_ns(), owner, name))
    steps.trainer, memory = one_storage_each(steps.trainer, ownership)
    torch.cuda.empty_cache()
    kept = residents(steps.trainer)
    memory.made = lambda tensor, name: notes.register(tensor.data_ptr(), time.time_ns(), name)
    steps.trainer.observed = lambda run: OwnedRun(run, ownership)
    steps.one()
    steps.settle()
    base = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
    try:
        steps.one()
        steps.settle()
        snapshot: Any = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = snapshot["device_traces"][device.index or 0]
    rows = [{key: event[key] for key in ("action", "addr", "size", "time_us")} for event in events]
    found = history_peak(rows, notes, kept, base)
    reserved, used = torch.cuda.max_memory_reserved(device), in_use(device)
    process = {"context": context, "NCCL": max(0, used - context - torch.cuda.memory_reserved(device)),
               "cached": reserved - found.bytes}  # fmt: skip
    return {
        "rank": steps.trainer.rank.number, "pp_rank": pp_rank, "basis": "allocator", "peak": found.bytes,
        "at": found.at,
        "owners": found.owners, "reserved": reserved, "device": used, "process": process, "live": found.rows(),
        "predicted": 0,
    }  # fmt: skip
