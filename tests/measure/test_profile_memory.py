"""Who holds memory at the peak: of a step on the CPU, and of a recorded history of torch's GPU allocator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penteract.measure.profile.allocator_events import AllocatorNotes, history_peak
from penteract.measure.profile.live_memory import KEPT, LiveMemory

HISTORY = Path(__file__).parent / "profiles" / "allocator_history.json"


def test_the_peak_is_the_most_that_was_alive_at_once():
    live = LiveMemory()
    for key, (size, owner) in enumerate([(10, "activations"), (5, "workspace")]):
        live.add(key, size, owner, "forward linear")
    live.remove(1)
    live.add(2, 4, "activations", "forward add")
    assert (live.now, live.peak.bytes, live.peak.at) == (14, 15, "forward linear")
    assert live.peak.owners == {"activations": 10, "workspace": 5}
    assert live.peak.rows() == [{"name": "forward linear", "count": 1, "bytes": 10}]
    live.remove(99)
    assert live.now == 14


def _notes(history: dict[str, list[list[object]]]) -> AllocatorNotes:
    notes = AllocatorNotes()
    for at, owner, name in history["marks"]:
        notes.event(int(str(at)), str(owner), str(name))
    for address, at, name in history["registers"]:
        notes.register(int(str(address)), int(str(at)), str(name))
    return notes


def test_a_history_of_the_gpus_allocator_is_laid_over_what_the_run_noted():
    """An address is used twice: by a workspace that is freed, then by a register."""
    history = json.loads(HISTORY.read_text())
    found = history_peak(history["events"], _notes(history), history["kept"], history["base"])
    assert found.bytes == history["base"] + 2048 + 512 + 1024
    assert found.at == "forward rms_norm (model/norm.py:14)"
    assert found.owners == {"parameters": 4096, "optimizer": 2048, KEPT: 256, "activations": 2560, "workspace": 1024}
    assert found.rows() == [{"name": "forward linear (model/mlp.py:17)", "count": 1, "bytes": 2048},
                            {"name": "forward rms_norm (model/norm.py:14)", "count": 1, "bytes": 512}]  # fmt: skip


@pytest.mark.parametrize("lost", ["registers", "marks"])
def test_bytes_add_up_whatever_was_not_noted(lost: str):
    history = json.loads(HISTORY.read_text()) | {lost: []}
    found = history_peak(history["events"], _notes(history), history["kept"], history["base"])
    assert sum(found.owners.values()) == found.bytes == history["base"] + 3584
