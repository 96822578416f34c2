"""The history of torch's GPU allocator, laid over what a run noted: who held what at the peak."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penteract.measure.profile.live_memory import KEPT, LiveMemory, Peak

_FREES = ("free_completed", "free")  # torch reports a request to free, then that it is done


@dataclass(slots=True)
class AllocatorNotes:
    """What a run noted, with nanoseconds since 1970, as the allocator's own clock.

    events     when an event of the walk began, its owner and its name
    registers  address -> when a register was made there, and by which call
    """

    events: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    registers: dict[int, list[tuple[int, str]]] = field(
        default_factory=lambda: defaultdict[int, list[tuple[int, str]]](list)
    )

    def event(self, at: int, owner: str, name: str) -> None:
        """An event begins to own what is allocated."""
        self.events.append((at, owner, name))

    def register(self, address: int, at: int, name: str) -> None:
        """A register has been made."""
        self.registers[address].append((at, name))


def history_peak(
    events: Sequence[Mapping[str, Any]], notes: AllocatorNotes, kept: Mapping[str, int], base: int
) -> Peak:
    """The peak of a step. `base`: bytes allocated when it began, of which `kept` have owners.

    An allocation belongs to the register that was noted at its address before the next allocation there; else to the
    event under way. The allocator rounds sizes up: its own are counted.
    """
    live, begins = LiveMemory(), [at for at, _, _ in notes.events]
    allocations = [event for event in events if event["action"] == "alloc"]
    later = defaultdict[int, list[int]](list)
    for event in allocations:
        later[event["addr"]].append(_nanoseconds(event))
    number = 0
    at_address = dict[int, int]()
    for event in events:
        address = int(event["addr"])
        if event["action"] == "alloc":
            owner, name = _owner(event, notes, begins, later[address])
            number += 1
            at_address[address] = number
            live.add(number, int(event["size"]), owner, name)
        elif event["action"] in _FREES and address in at_address:
            live.remove(at_address.pop(address))
    owners = Counter(kept)
    owners.update(live.peak.owners)
    owners[KEPT] += base - sum(kept.values())
    found = {owner: size for owner, size in owners.items() if size}
    return Peak(base + live.peak.bytes, live.peak.at, found, live.peak.made_by)


def _owner(
    event: Mapping[str, Any], notes: AllocatorNotes, begins: Sequence[int], times: Sequence[int]
) -> tuple[str, str]:
    """Who an allocation belongs to, and in which call it was made. `times`: of all allocations at its address."""
    at = _nanoseconds(event)
    following = bisect_right(times, at)
    until = times[following] if following < len(times) else float("inf")
    for noted, name in notes.registers.get(int(event["addr"]), ()):
        if at <= noted < until:
            return "activations", name
    i = bisect_right(begins, at + 999) - 1  # the allocator's clock has whole microseconds
    return notes.events[i][1:] if i >= 0 else ("other", "")


def _nanoseconds(event: Mapping[str, Any]) -> int:
    return 1000 * int(event["time_us"])
