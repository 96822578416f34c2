"""What happens to buckets during the actions of a step, derived once from who reads and who writes their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penteract.errors import Bug
from penteract.ops.lower import Instruction
from penteract.parallel.data import Bucket
from penteract.spec.layout import Layout
from penteract.step.ring import count_units, fetches, places

Question = Literal["gather", "need", "open", "reduce", "land", "replicate"]
Event = tuple[Question, int]  # what to ask a reading about which bucket
READS = ("forward", "input_gradient")  # phases that read parameters
At = tuple[int, int]  # an action, and the position of an instruction in it


class Around(NamedTuple):
    """Events before and after an instruction."""

    before: tuple[Event, ...] = ()
    after: tuple[Event, ...] = ()


Events = Mapping[At, Around]


class Touch(NamedTuple):
    """An instruction that reads parameters or writes their gradients."""

    at: At
    buckets: tuple[int, ...]
    names: tuple[str, ...]
    writes: bool


@dataclass(slots=True)
class _Timetable:
    buckets: Sequence[Bucket]
    layout: Layout
    touches: list[Touch]
    before: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict[At, list[Event]](list))
    after: defaultdict[At, list[Event]] = field(default_factory=lambda: defaultdict[At, list[Event]](list))

    def events(self) -> Events:
        ats = {at: Around(tuple(self.before.get(at, ())), tuple(self.after.get(at, ()))) for at in self.before}
        return ats | {at: Around((), tuple(after)) for at, after in self.after.items() if at not in ats}

    # ---- parameters ------------------------------------------------------------------------------------------

    def gathers(self) -> None:
        """ZeRO 3: each unit is gathered one turn ahead of its use, into the place that is free then."""
        of_unit = defaultdict[int, list[int]](list)
        for i, b in enumerate(self.buckets):
            if b.cut_parameters:
                of_unit[b.unit].append(i)
        turns = list[tuple[At, int]]()
        for t in self.touches:
            for b in t.buckets if not t.writes else ():
                unit = self.buckets[b].unit
                if self.buckets[b].cut_parameters and (not turns or turns[-1][1] != unit):
                    turns.append((t.at, unit))
        order, flying = [unit for _, unit in turns], set[int]()
        started = fetches(order, places(self.layout, count_units(self.buckets)))
        for (at, now), fresh in zip(turns, started, strict=True):
            self.before[at].extend(("gather", b) for unit in fresh for b in of_unit[unit])
            flying |= {*fresh}
            if now in flying:
                flying.remove(now)
                self.before[at].extend(("need", b) for b in of_unit[now])

    def needs(self) -> None:
        """What was gathered after the last update is waited for at its first use."""
        used = set[int]()
        for t in self.touches:
            for b in t.buckets if not t.writes else ():
                if b not in used and self.buckets[b].shards > 1 and not self.buckets[b].cut_parameters:
                    self.before[t.at].append(("need", b))
                used.add(b)

    # ---- gradients -------------------------------------------------------------------------------------------

    def whole_sums(self, end: At) -> None:
        """A bucket that gathers all micro-batches is summed after its last writer, or at the end where stages share it;
        over replicas, when the next one is."""
        last: dict[int, At] = {b: t.at for t in self.touches if t.writes for b in t.buckets}
        due: list[tuple[At, int]] = []
        for b, at in last.items():
            if not self.buckets[b].cut_gradients:
                due.append((end if self.buckets[b].across_stages else at, b))
        waiting: int | None = None
        for at, b in sorted(due):
            events = self.before[at] if at == end else self.after[at]
            if waiting is not None:
                events.append(("replicate", waiting))
            events.append(("reduce", b))
            waiting = b if self._has_replicas(b) else None
        if waiting is not None:
            self.before[end].append(("replicate", waiting))

    def cut_sums(self, end: At) -> None:
        """A bucket whose gradients are cut is whole within one action alone, in the place of its unit.

        Before another takes the place, what has left from there must have landed.
        """
        first: dict[tuple[int, int], At] = {}  # (action, bucket)
        last: dict[tuple[int, int], At] = {}
        written = defaultdict[tuple[int, int], set[str]](set)
        for t in self.touches:
            for b in t.buckets if t.writes else ():
                if self.buckets[b].cut_gradients:
                    first.setdefault((t.at[0], b), t.at)
                    last[t.at[0], b] = t.at
                    written[t.at[0], b] |= {*t.names}
        self._check_whole(written)
        final = {b: at for (_, b), at in last.items()}
        flying: list[list[int]] = [[], []]
        tenant = [(-1, -1), (-1, -1)]  # action and unit
        for at, b in sorted((at, b) for (_, b), at in first.items()):
            unit = self.buckets[b].unit
            place = unit % 2
            if tenant[place] != (at[0], unit):
                for other in flying[place]:
                    self._check_left(last[tenant[place][0], other], at, other)
                    self._land(self.before[at], other, done=final[other] < at)
                flying[place], tenant[place] = [], (at[0], unit)
            self.before[at].append(("open", b))
            self.after[last[at[0], b]].append(("reduce", b))
            flying[place].append(b)
        for b in sorted({b for some in flying for b in some}, key=lambda b: (final[b], b)):
            self._land(self.before[end], b, done=True)

    def _land(self, events: list[Event], bucket: int, *, done: bool) -> None:
        events.append(("land", bucket))
        if done and self._has_replicas(bucket):
            events.append(("replicate", bucket))

    def _has_replicas(self, bucket: int) -> bool:
        b = self.buckets[bucket]
        return b.shards > 1 and len(b.replicas) > 1

    def _check_left(self, written: At, at: At, bucket: int) -> None:
        if written > at:
            raise Bug("BUCKET", f"bucket {bucket} is still written at {written} when its place is taken at {at}")

    def _check_whole(self, written: Mapping[tuple[int, int], set[str]]) -> None:
        for (action, b), names in written.items():
            if missing := {q.name for q in self.buckets[b].params} - names:
                raise Bug("BUCKET", f"action {action} writes a part of a bucket alone, without {sorted(missing)[0]}")


def touches(buckets: Sequence[Bucket], instructions: Iterator[tuple[At, Instruction]]) -> Iterator[Touch]:
    """Every instruction with parameters, in the order of the walk."""
    bucket_of = {q.name: b for b, bucket in enumerate(buckets) for q in bucket.params}
    for at, instruction in instructions:
        site = instruction.call.site
        if site.params:
            own = tuple(dict.fromkeys(bucket_of[n] for n in site.params))
            yield Touch(at, own, site.params, instruction.call.phase == "weight_gradient")


def events(
    buckets: Sequence[Bucket], layout: Layout, instructions: Iterator[tuple[At, Instruction]], end: At
) -> Events:
    """All that happens to buckets. `end`: the moment after the last action."""
    table = _Timetable(buckets, layout, list(touches(buckets, instructions)))
    table.gathers()
    table.needs()
    table.whole_sums(end)
    table.cut_sums(end)
    return table.events()
