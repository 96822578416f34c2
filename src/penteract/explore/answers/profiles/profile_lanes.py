"""The step in time: what was predicted of its pipeline rank, and below it what the rank measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from penteract.explore.amounts import moments
from penteract.explore.answers.profiles.shown_times import PS, part_of, safe, time_text
from penteract.explore.answers.schedules.lane_kinds import KINDS as OF_SCHEDULES
from penteract.explore.answers.schedules.lane_kinds import TimeKind
from penteract.explore.schemas.profile_schema import ProfileBlock, ProfileLane, ProfileLanes
from penteract.explore.schemas.schedule_schema import LaneKind, LaneSpan, LaneTime
from penteract.measure.schemas.profile import ProfileFile, TimelineLane, TimelineName
from penteract.readings.time.timelines.joined import joined

_PARTS = 6000  # of a lane: what is shorter is joined to its neighbours
KINDS = (
    TimeKind("compute", "Products", "Kernels of matrix products."),
    TimeKind("attention", "Attention", "Kernels of attention."),
    TimeKind("pointwise", "Memory-bound ops", "Norms, activations, additions: they wait for the device's memory."),
    TimeKind("update", "Optimizer", "The update of parameters, and what ranks agree on before it."),
    TimeKind("unmatched", "Unmatched", "What no part of the program launched, or of a part without a prediction."),
    TimeKind("exposed", "Exposed communication", "Compute waits for a collective, or for a copy, that nothing hides."),
    TimeKind("idle", "Bubble", "The rank waits for another pipeline rank."),
    TimeKind("launch", "Host gaps", "Nothing runs: the host has not launched the next kernel yet."),
    *(kind for kind in OF_SCHEDULES if kind.other_stream),
)
_NUMBER = {one.name: i for i, one in enumerate(KINDS)}
_EXPOSED = ("tensor", "context", "expert", "data", "host")
PART_KINDS = {
    **{part: _NUMBER[part] for part in ("compute", "attention", "pointwise", "update", "unmatched", "launch")},
    **dict.fromkeys(_EXPOSED, _NUMBER["exposed"]), "pipeline": _NUMBER["idle"],
}  # fmt: skip
_MISSING = "This profile has no timeline: it was made by an earlier version. Profile the run again to see its lanes."


def kind_of(part: str) -> int:
    """The kind of a part of the waterfall."""
    return PART_KINDS.get(part, PART_KINDS["unmatched"])


def profile_lanes(profile: ProfileFile, rank: int) -> ProfileLanes:
    """The lanes of a rank of the profile."""
    if not (timeline := profile.get("timeline")):
        return _none(_MISSING)
    measured = next((lane for lane in timeline["measured"] if lane["rank"] == rank), None)
    if measured is None:
        return _none(f"This profile has no timeline of rank {rank}.")
    planned = [lane for lane in timeline["predicted"] if lane["pp_rank"] == measured["pp_rank"]]
    ops = {row["name"]: i for i, row in enumerate(profile["ops"]) if row["pp_rank"] == measured["pp_rank"]}
    lanes = [_lane(lane, timeline["names"], ops) for lane in (*planned[:1], measured)]
    end = max(lane["end"] for lane in lanes)
    return {
        "kinds": _kinds(lanes), "lanes": lanes, "end": end, "marks": moments(end / PS), "most": 0,
        "seconds": " and ".join(time_text(lane["end"]) for lane in lanes), "missing": "",
    }  # fmt: skip


def _none(why: str) -> ProfileLanes:
    return {"kinds": [], "lanes": [], "end": 0, "marks": [], "most": 0, "seconds": "", "missing": why}


class _Stretch(NamedTuple):
    place: int
    start: int
    end: int


def _lane(lane: TimelineLane, names: Sequence[TimelineName], ops: Mapping[str, int]) -> ProfileLane:
    whole, rank = sum(lane["compute"][1::2]), lane["rank"]
    least = -(-whole // _PARTS)
    stretches = list(_stretches(joined(zip(lane["compute"][::2], lane["compute"][1::2], strict=True), least)))
    sums = Counter[int]()
    for place, length in zip(lane["compute"][::2], lane["compute"][1::2], strict=True):
        sums[kind_of(names[place]["part"])] += length
    streams = list[LaneSpan]()
    for stream in lane["streams"]:
        kind, spans = _NUMBER[stream["kind"]], stream["spans"]
        sums[kind] += sum(spans[2::3])
        streams += (
            _span(kind, names[place]["name"], start, start + length)
            for place, start, length in zip(spans[::3], spans[1::3], spans[2::3], strict=True)
        )
    label, where = ("Predicted", f"pipeline rank {lane['pp_rank']}") if rank is None else ("Measured", f"rank {rank}")
    return {
        "pp_rank": lane["pp_rank"], "label": label, "short": label[0], "gpus": where, "begin": 0, "end": whole,
        "blocks": [_block(stretch, names[stretch.place], ops) for stretch in stretches],
        "other_streams": sorted(streams, key=lambda span: span["start"]),
        "times": [_time(sums[number], whole) for number in range(len(KINDS))], "flight": [], "most": 0,
        "shown": rank is not None,
    }  # fmt: skip


def _stretches(flat: Sequence[int]) -> Iterator[_Stretch]:
    """Those of a name that follow each other are one."""
    at = 0
    for place, some in groupby(zip(flat[::2], flat[1::2], strict=True), key=lambda one: one[0]):
        length = sum(one[1] for one in some)
        yield _Stretch(place, at, at + length)
        at += length


def _block(stretch: _Stretch, name: TimelineName, ops: Mapping[str, int]) -> ProfileBlock:
    kind, length = kind_of(name["part"]), stretch.end - stretch.start
    label = KINDS[kind].label.lower()
    what = safe(name["name"]) or label
    text = f"{what}: {_took(stretch.start, stretch.end)}" + (f" · {label}" if name["name"] else "")
    return {"name": safe(_short(name["name"])), "kind": kind, "start": stretch.start, "end": stretch.end,
            "intervals": [kind, length], "text": text, "op": ops.get(name["name"], -1)}  # fmt: skip


def _short(name: str) -> str:
    """What fits into a bar: "forward linear (model/mlp.py:17)" is "linear"."""
    words = name.partition(" (")[0].split(" ")
    return words[1] if len(words) > 1 and words[0] in _PHASES else " ".join(words)


_PHASES = ("forward", "input_gradient", "weight_gradient", "start", "finish")


def _span(kind: int, name: str, start: int, end: int) -> LaneSpan:
    return {
        "kind": kind,
        "start": start,
        "end": end,
        "text": f"{KINDS[kind].label}: {safe(name)} · {_took(start, end)}",
    }


def _took(start: int, end: int) -> str:
    return f"{time_text(end - start)} {f'from {time_text(start)}' if start else 'from the beginning'}"


def _time(length: int, whole: int) -> LaneTime:
    return {"picoseconds": length, "text": time_text(length), "share": part_of(length, whole)}


def _kinds(lanes: Sequence[ProfileLane]) -> list[LaneKind]:
    """The kinds, with the time of the last lane: the measured one."""
    return [
        {"name": one.name, "label": one.label, "about": one.about, "other_stream": one.other_stream,
         "seconds": time["text"], "share": time["share"]}
        for one, time in zip(KINDS, lanes[-1]["times"], strict=True)
    ]  # fmt: skip
