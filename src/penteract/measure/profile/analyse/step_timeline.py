"""The timeline of a profile: one step as it was planned, of each pipeline rank, and as it ran, of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from penteract.measure.profile.analyse.attribution import GAPS, moments
from penteract.measure.profile.prediction import Prediction, part_of
from penteract.measure.profile.recording import Recording
from penteract.measure.profile.trace_events import Span
from penteract.measure.schemas.profile import OtherStream, StepTimeline, StreamSpans, TimelineLane
from penteract.readings.time.timelines.joined import joined
from penteract.readings.time.timelines.trace import other_stream

_PARTS, _MOST = 20_000, 200_000  # of a step, and of all lanes: what is shorter is joined to its neighbours
_KINDS: tuple[OtherStream, ...] = ("message", "gather", "collective", "copy")
Number = Callable[[str, str], int]  # (name, part) -> its place among the names


def step_timeline(predicted: Prediction, recordings: Sequence[Recording]) -> StepTimeline:
    """The predicted step of each pipeline rank, and of each rank the profiled step of median length."""
    names, pp_ranks = dict[tuple[str, str], int](), predicted.run.layout.pp
    number: Number = lambda name, part: names.setdefault((name, part), len(names))  # noqa: E731 (it fills the table)
    parts = min(_PARTS, _MOST // (pp_ranks + len(recordings)))
    planned = [_planned(predicted, pp_rank, number, parts) for pp_rank in range(pp_ranks)]
    measured = [_measured(predicted, recording, number, parts) for recording in recordings]
    return {"names": [{"name": name, "part": part} for name, part in names], "predicted": planned,
            "measured": measured}  # fmt: skip


def _planned(predicted: Prediction, pp_rank: int, number: Number, parts: int) -> TimelineLane:
    begin, whole = predicted.span.begins[pp_rank], predicted.span.picoseconds
    least, others = -(-whole // parts), list[tuple[OtherStream, int, int, int]]()
    computed = list[tuple[int, int, int]]()
    for e in sorted((e for e in predicted.events if e.pp_rank == pp_rank), key=lambda e: (e.start, e.end)):
        start, end = max(0, e.start - begin), min(whole, e.end - begin)
        if start >= end:
            continue
        place = number(e.name, part_of(e.name, predicted.parts))
        if e.stream == "compute":
            computed.append((place, start, end))
        elif kind := other_stream(e):
            others.append((kind, place, start, end))
    compute = joined(_without_gaps(computed, whole, number("", GAPS)), least)
    return {
        "pp_rank": pp_rank,
        "rank": None,
        "picoseconds": whole,
        "compute": compute,
        "streams": _streams(others, least),
    }


def _without_gaps(computed: Iterable[tuple[int, int, int]], whole: int, nothing: int) -> Iterator[tuple[int, int]]:
    at = 0
    for place, start, end in chain(computed, [(nothing, whole, whole)]):
        if start > at:
            yield nothing, start - at
        if end > at:
            yield place, end - max(at, start)
            at = end


def _measured(predicted: Prediction, recording: Recording, number: Number, parts: int) -> TimelineLane:
    name_part = partial(part_of, parts=predicted.parts)
    step = sorted(recording.steps, key=lambda step: step.nanoseconds)[len(recording.steps) // 2]
    whole = 1000 * step.nanoseconds
    least = -(-whole // parts)
    found = moments(step, name_part, on_device=recording.on_device)
    compute = joined(((number(m.name, m.part), 1000 * (m.end - m.begin)) for m in found), least)
    others: list[tuple[OtherStream, int, int, int]] = [
        (kind, number(span.name, name_part(span.name)), 1000 * start, 1000 * end)
        for span in step.spans
        if (kind := _kind(span)) and (end := min(step.nanoseconds, span.end)) > (start := max(0, span.begin))
    ]
    return {"pp_rank": recording.pp_rank, "rank": recording.rank, "picoseconds": whole, "compute": compute,
            "streams": _streams(others, least)}  # fmt: skip


def _kind(span: Span) -> OtherStream | None:
    if span.kind not in ("collective", "copy"):
        return None
    if span.kind == "copy":
        return "copy"
    if span.name.startswith(("send ", "recv ")):
        return "message"
    return "gather" if "all_gather" in span.name else "collective"


def _streams(others: Sequence[tuple[OtherStream, int, int, int]], least: int) -> list[StreamSpans]:
    """Spans by kind; one that is shorter than `least` is joined to the one before it, if that is as near."""
    found = list[StreamSpans]()
    for kind in _KINDS:
        spans, until = list[int](), -least
        for place, start, end in sorted((row[1:] for row in others if row[0] == kind), key=lambda row: row[1:]):
            if spans and end - start < least and start - until < least:
                spans[-1] = max(spans[-1], end - spans[-2])
            else:
                spans += (place, start, end - start)
            until = max(until, end)
        if spans:
            found.append({"kind": kind, "spans": spans})
    return found
