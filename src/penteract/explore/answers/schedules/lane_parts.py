"""One rank of a simulated step as a lane: its time in blocks, what runs on other streams, and what is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from penteract.explore.answers.schedules.lane_kinds import IDLE, KINDS, LAUNCH, of_compute, of_other_stream
from penteract.explore.schemas.schedule_schema import LaneBlock, LaneSpan, LaneTime
from penteract.readings.time.timelines.joined import joined
from penteract.readings.time.timelines.timeline import Event
from penteract.readings.time.timelines.trace import shown_name
from penteract.schedule.actions import Compute, ComputeList, computes
from penteract.units import show_step

PICO = 1e-12
_PASSES = {"Fwd": "forward", "Bwd": "backward", "Inp": "input gradients", "Wgt": "weight gradients"}


class Interval(NamedTuple):
    """Time of one kind within one action; an action of "" is outside of passes."""

    kind: int
    action: str
    name: str
    start: int
    end: int


@dataclass(slots=True)
class LaneParts:
    """The events of one rank, as they come: adjacent ones of a kind and an action are one interval."""

    computed: list[Interval] = field(default_factory=list[Interval])
    others: list[tuple[int, int, int, str]] = field(default_factory=list[tuple[int, int, int, str]])

    def event(self, e: Event) -> None:
        """Take an event of this rank."""
        if e.stream != "compute":
            if (kind := of_other_stream(e)) is not None:
                what = " of ".join(text for text in (shown_name(e)[0], e.unit) if text)
                about = f"{what}, {e.stream}" if " pp rank " in e.stream else what
                self.others.append((kind, e.start, e.end, about))
            return
        kind, last = of_compute(e), self.computed[-1] if self.computed else None
        if last and (last.kind, last.action, last.end) == (kind, e.action, e.start):
            self.computed[-1] = last._replace(end=e.end)
        elif e.end > e.start:
            self.computed.append(Interval(kind, e.action, e.name, e.start, e.end))

    def whole(self, begin: int) -> Iterator[Interval]:
        """All intervals from `begin` on, without gaps: compute that does nothing and waits for nothing waits for the
        host. A step ends with an update, so the last interval ends with it."""
        at = begin
        for interval in self.computed:
            if interval.start > at:
                yield Interval(LAUNCH, interval.action, "", at, interval.start)
            yield interval
            at = interval.end


def blocks(intervals: Sequence[Interval], least: int, passes: ComputeList) -> list[LaneBlock]:
    """The intervals in blocks: each pass, and each time between passes, is one. A bubble is a block of its own."""
    computes_of = {str(action): computes(action) for action in passes}
    found = list[LaneBlock]()
    for (action, idle), some in groupby(intervals, key=lambda p: ("" if p.kind == IDLE else p.action, p.kind == IDLE)):
        parts = list(some)
        found.append(_block(parts, action, least, computes_of.get(action, ()), parts[0].name if idle else ""))
    return found


def _block(parts: list[Interval], action: str, least: int, passes: tuple[Compute, ...], waits: str) -> LaneBlock:
    start, end, sums = parts[0].start, parts[-1].end, Counter[int]()
    for interval in parts:
        sums[interval.kind] += interval.end - interval.start
    most = max(sums, key=sums.__getitem__)
    what = " and ".join(f"{_PASSES[p.kind]} of micro-batch {p.micro}" + f", chunk {p.chunk}" * bool(p.chunk)
                        for p in passes) or KINDS[most].label.lower()  # fmt: skip
    named = " · ".join(text for text in (action, what) if text)
    inside = [f"{KINDS[k].label.lower()} {show_step(sums[k] * PICO)}" for k in sorted(sums)] if len(sums) > 1 else []
    return {
        "name": action, "kind": most, "start": start, "end": end,
        "intervals": joined(((p.kind, p.end - p.start) for p in parts), least),
        "text": " · ".join([f"{named}: {took(start, end)}", *([waits] if waits else inside)]),
    }  # fmt: skip


def spans(lane: LaneParts, begin: int, end: int, least: int) -> tuple[list[LaneSpan], Counter[int]]:
    """What runs on other streams than compute from `begin` to `end`, and how long something of each kind runs. Spans
    with less than `least` between them are drawn as one."""
    inside = sorted((kind, max(begin, s), min(end, e), what) for kind, s, e, what in lane.others
                    if e > s and s < end and e > begin)  # fmt: skip
    found, busy = list[LaneSpan](), Counter[int]()
    for kind, some in groupby(inside, key=lambda one: one[0]):
        group, until = list[tuple[int, int, str]](), begin
        for _, start, stop, what in some:
            if group and start - until >= least:
                found.append(_span(kind, group, until))
                group = []
            busy[kind] += max(0, stop - max(start, until))
            until = max(until, stop)
            group.append((start, stop, what))
        found.append(_span(kind, group, until))
    return found, busy


def _span(kind: int, group: Sequence[tuple[int, int, str]], end: int) -> LaneSpan:
    start, (first, count) = group[0][0], Counter(what for *_, what in group).most_common(1)[0]
    what = first if len(group) == 1 else f"{len(group)} × {first}" if count == len(group) else (
        f"{len(group)}, most of them {first}"
    )  # fmt: skip
    return {"kind": kind, "start": start, "end": end, "text": f"{KINDS[kind].label}: {what} · {took(start, end)}"}


def took(start: int, end: int) -> str:
    """How long, and from when."""
    return f"{show_step((end - start) * PICO)} {f'from {show_step(start * PICO)}' if start else 'from the beginning'}"


def in_flight(found: Sequence[LaneBlock], passes: ComputeList) -> list[int]:
    """When the number of micro-batches in flight changes, and to what: from the beginning of a forward pass to the end
    of the last pass of the same micro-batch through the same chunk."""
    begins, ends = dict[str, int](), dict[str, int]()
    for block in found:
        begins.setdefault(block["name"], block["start"])
        ends[block["name"]] = block["end"]
    first, last = dict[tuple[int, int], str](), dict[tuple[int, int], str]()
    for action in passes:
        for one in computes(action):
            first.setdefault((one.micro, one.chunk), str(action))
            last[one.micro, one.chunk] = str(action)
    changes = Counter[tuple[int, int]]()
    for place, name in first.items():
        changes[begins[name], 1] += 1
        changes[ends[last[place]], -1] += 1
    out, count = list[int](), 0
    for (when, by), times in sorted(changes.items()):  # at one moment, what ends comes first
        count += by * times
        out += (when, count)
    return out


def lane_time(length: int, whole: int) -> LaneTime:
    """The time of a kind with its share of a lane."""
    return {"picoseconds": length, "text": show_step(length * PICO), "share": f"{length / max(1, whole):.1%}"}
