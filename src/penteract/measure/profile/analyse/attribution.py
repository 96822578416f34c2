"""To which part of the step each of its moments belongs: parts that add up to it exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from penteract.measure.profile.recording import Recording
from penteract.measure.profile.trace_events import Kind, RecordedStep, Span

PartOf = Callable[[str], str]
GAPS = "launch"  # the part of moments in which nothing runs
OWN = ("compute", "attention", "pointwise", "update", "unmatched")  # parts that are a rank's own work
# On a GPU a collective that runs while nothing computes is exposed. On a CPU it runs in threads of gloo: exposed is
# what the main thread waits for.
_SHOWN: Mapping[bool, tuple[Kind, ...]] = {
    True: ("compute", "collective", "copy"), False: ("compute", "wait", "copy")
}  # fmt: skip


class PartMoment(NamedTuple):
    """A stretch of a step, in nanoseconds from its beginning: its part, and the name and kind of what ran; "" and None
    for nothing."""

    begin: int
    end: int
    part: str
    name: str
    kind: Kind | None


def moments(step: RecordedStep, part_of: PartOf, *, on_device: bool) -> Iterator[PartMoment]:
    """A step without gaps or overlaps. Where several things run, compute counts, then a collective, then a copy, and of
    equals the one that began first."""
    kinds = _SHOWN[on_device]
    edges = list[tuple[int, int, int]]()  # moment, end before begin, span
    shown = (span for span in step.spans if span.kind in kinds and span.nanoseconds > 0)
    spans = [span for span in shown if span.begin < step.nanoseconds and span.end > 0]
    for i, span in enumerate(spans):
        edges += [(max(0, span.begin), 1, i), (min(step.nanoseconds, span.end), 0, i)]
    running, at = set[int](), 0
    for moment, begins, i in sorted(edges):
        now = min(max(moment, 0), step.nanoseconds)
        if now > at:
            yield PartMoment(at, now, *_what(spans, running, kinds, part_of))
            at = now
        if begins:
            running.add(i)
        else:
            running.discard(i)
    if at < step.nanoseconds:
        yield PartMoment(at, step.nanoseconds, GAPS, "", None)


def attribute(step: RecordedStep, part_of: PartOf, *, on_device: bool) -> Counter[str]:
    """Nanoseconds of a step by part; they sum to the step."""
    found = Counter[str]()
    for moment in moments(step, part_of, on_device=on_device):
        found[moment.part] += moment.end - moment.begin
    return found


def _what(
    spans: list[Span], running: Iterable[int], kinds: tuple[Kind, ...], part_of: PartOf
) -> tuple[str, str, Kind | None]:
    """The part, the name and the kind of what counts among the spans that run."""
    chosen = min(((kinds.index(spans[i].kind), spans[i].begin, i) for i in running), default=None)
    if chosen is None:
        return GAPS, "", None
    span = spans[chosen[2]]
    return "host" if span.kind == "copy" else part_of(span.name), span.name, span.kind


def rank_parts(recording: Recording, part_of: PartOf) -> dict[str, int]:
    """Picoseconds of each part in the mean profiled step of a rank; they sum to that step to the picosecond."""
    totals = Counter[str]()
    for step in recording.steps:
        totals.update(attribute(step, part_of, on_device=recording.on_device))
    return split_evenly(totals, len(recording.steps))


def split_evenly(totals: Mapping[str, int], count: int) -> dict[str, int]:
    """Nanoseconds of `count` steps as picoseconds of one. Rounding is carried along, so the sum stays exact."""
    found, before, at = dict[str, int](), 0, 0
    for name, nanoseconds in sorted(totals.items()):
        at += 1000 * nanoseconds
        found[name] = round(at / count) - round(before / count)
        before = at
    return found


def own_work(parts: Mapping[str, int]) -> int:
    """Picoseconds of a rank's own kernels."""
    return sum(parts.get(part, 0) for part in OWN)
