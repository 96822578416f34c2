"""Does every collective and message of a rank have its partner on the other ranks?

Two ranks of a group must start the same collectives in it, in one order. What one pipeline rank sends, the next must
receive, in the same bytes. And ranks that wait for each other must get on: events are played with all ranks at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest
from typing import NamedTuple

from penteract.measure.rehearse.findings import Fault
from penteract.measure.rehearse.rank_rehearsal import RankRehearsal
from penteract.measure.rehearse.wires import RehearsedWire, shown

Group = tuple[tuple[int, ...], str]  # ranks, and the channel of messages


class NumberedWire(NamedTuple):
    """A wire among those of its group, or of its pair of ranks: the how manieth."""

    group: Group
    number: int


def unmatched(ranks: Sequence[RankRehearsal]) -> list[Fault]:
    """What does not fit between ranks that were rehearsed, in their first step; the most telling first."""
    found = [fault for a, b in combinations(ranks, 2) for fault in _between(a, b)]
    return found or list(_stuck(ranks))


def _between(a: RankRehearsal, b: RankRehearsal) -> Iterator[Fault]:
    mine, theirs = _by_group(a), _by_group(b)
    made = {one.rank: {group for group, _ in one.groups} for one in (a, b)}
    for group in dict.fromkeys((*mine, *theirs)):
        members, channel = group
        if a.rank not in members or b.rank not in members:
            continue
        if channel:
            yield from _messages(group, mine.get(group, []), theirs.get(group, []), a.rank, b.rank)
            continue
        for one in (a, b):
            if members not in made[one.rank]:
                yield Fault(
                    "GROUP", f"it does not make the group {shown(members)}, and others do", "the start", one.rank
                )
        yield from _collectives(members, mine.get(group, []), theirs.get(group, []), a.rank, b.rank)


def _by_group(one: RankRehearsal) -> dict[Group, list[RehearsedWire]]:
    """A rank's wires of the first step: collectives by group, messages by pair and channel."""
    found = defaultdict[Group, list[RehearsedWire]](list)
    for number in one.first:
        wire = one.wires[number]
        if wire.kind != "copy":
            found[wire.ranks, wire.channel].append(wire)
    return found


def _collectives(
    members: tuple[int, ...], a: list[RehearsedWire], b: list[RehearsedWire], one: int, other: int
) -> Iterator[Fault]:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if not _alike(x, y):
            yield Fault("COLLECTIVE", f"number {i + 1} over {shown(members)} is {_said(x)}, and on rank {other} "
                        f"{_said(y)} ({y.at})", x.at, one)  # fmt: skip
            return
    if len(a) != len(b):
        many, at, without = (a, one, other) if len(a) > len(b) else (b, other, one)
        lone = many[last := min(len(a), len(b))]
        what = f"{_said(lone)}, number {last + 1} over {shown(members)}, has no partner on rank {without}"
        yield Fault("COLLECTIVE", what, lone.at, at)


def _messages(group: Group, a: list[RehearsedWire], b: list[RehearsedWire], one: int, other: int) -> Iterator[Fault]:
    (source, _), channel = group
    sent, received = (a, b) if source == one else (b, a)
    sender, receiver = (one, other) if source == one else (other, one)
    for i, (x, y) in enumerate(zip_longest(sent, received)):
        if y is None:
            yield Fault(
                "MESSAGE", f"its {_said(x)}, {channel} {i + 1} to rank {receiver}, has no receive there", x.at, sender
            )
            return
        if x is None:
            yield Fault(
                "MESSAGE", f"its {_said(y)}, {channel} {i + 1} from rank {sender}, has no send there", y.at, receiver
            )
            return
        if (x.bytes, x.dtype) != (y.bytes, y.dtype):
            what = f"{channel} {i + 1} to rank {receiver} is a {_said(x)}, and there a {_said(y)}"
            yield Fault("MESSAGE", what, x.at, sender)
            return


def _alike(x: RehearsedWire, y: RehearsedWire) -> bool:
    """Uneven all-to-alls have bytes of their own on each rank."""
    return (x.kind, x.dtype) == (y.kind, y.dtype) and (x.bytes == y.bytes or x.kind == "all_to_all_v")


def _said(wire: RehearsedWire) -> str:
    return f"{wire.kind} of {wire.bytes:,} bytes of {wire.dtype}"


# ---- waits -----------------------------------------------------------------------------------------------------------


def _stuck(ranks: Sequence[RankRehearsal]) -> Iterator[Fault]:
    """Play the events of all ranks: a wait is over once all of them have started what is waited for."""
    places = {one.rank: _places(one) for one in ranks}
    members = {one.rank for one in ranks}
    needed = Counter(place for found in places.values() for place in found.values())
    started, at = Counter[NumberedWire](), dict.fromkeys(members, 0)
    events = {one.rank: [e for e in one.events if e.number in places[one.rank]] for one in ranks}
    moved = True
    while moved:
        moved = False
        for rank, mine in events.items():
            while at[rank] < len(mine):
                event = mine[at[rank]]
                place = places[rank][event.number]
                if event.wait and started[place] < needed[place]:
                    break
                started[place] += not event.wait
                at[rank] += 1
                moved = True
    for one in ranks:
        if at[one.rank] < len(events[one.rank]):
            wire = one.wires[events[one.rank][at[one.rank]].number]
            yield Fault("DEADLOCK", f"it waits for ever for {_said(wire)} over {shown(wire.ranks)}", wire.at, one.rank)
            return


def _places(one: RankRehearsal) -> dict[int, NumberedWire]:
    """Each wire of the first step -> its place among those of its group."""
    seen, found = Counter[Group](), dict[int, NumberedWire]()
    for number in one.first:
        wire = one.wires[number]
        if wire.kind != "copy":
            group = (wire.ranks, wire.channel)
            found[number] = NumberedWire(group, seen[group])
            seen[group] += 1
    return found
