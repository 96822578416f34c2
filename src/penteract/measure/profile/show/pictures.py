"""The two pictures of a profile's page: the waterfall, and the predicted and measured timelines of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from penteract.measure.profile.show.profile_text import show
from penteract.measure.schemas.profile import ProfileFile, StepTimeline, TimelineLane, WaterfallRow

COLOURS: Mapping[str, str] = {
    "compute": "#2f6fb0", "attention": "#6a51a3", "pointwise": "#4aa3a2", "tensor": "#e08214", "context": "#f1b04c",
    "expert": "#c2a500", "data": "#d6604d", "pipeline": "#9e9e9e", "update": "#5a8f3c", "host": "#a6611a",
    "unmatched": "#c51b8a",
}  # fmt: skip
_WIDTH, _LEFT, _ROW, _LANE = 1160, 230, 22, 16
_RIGHT = 150
_LEAST = 0.35  # of a pixel: what is narrower is joined with its neighbour
_MOST_RANKS = 8


def waterfall_picture(rows: Sequence[WaterfallRow]) -> str:
    """The waterfall: each change begins where the one before it ends."""
    edges, at = list[tuple[int, int]](), 0
    for row in rows:
        begin = 0 if row["level"] else at
        at = row["picoseconds"] if row["level"] else at + row["picoseconds"]
        edges.append((min(begin, at), max(begin, at)))
    least, most = min(begin for begin, _ in edges), max(end for _, end in edges)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1, most - least)
    height = _ROW * len(rows) + 8
    lines = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="From the ideal step to the measured one">']
    for i, (row, (begin, end)) in enumerate(zip(rows, edges, strict=True)):
        y, x, width = i * _ROW + 4, _LEFT + (begin - least) * scale, max(1.0, (end - begin) * scale)
        colour = (
            "#56616f" if row["level"] else "#2e8b57" if row["picoseconds"] < 0 else COLOURS.get(row["name"], "#b3541e")
        )
        weight = ' font-weight="600"' if row["level"] else ""
        size = show(row["picoseconds"], "" if row["level"] else "+")
        lines.append(
            f'<g><title>{escape(row["about"])}</title><text x="{0 if row["level"] else 14}" y="{y + 14}"{weight}>'
            f'{escape(row["label"])}</text><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 5}" '
            f'fill="{colour}"/><text x="{x + width + 6:.1f}" y="{y + 14}"{weight}>{size} '
            f'<tspan class="soft">{row["share"]:.1%}</tspan></text></g>'
        )  # fmt: skip
    return "\n".join([*lines, "</svg>"])


class Bar(NamedTuple):
    """A bar of a lane: shares of the picture's width, its part, and what it is."""

    begin: float
    end: float
    part: str
    name: str


class TimelineBars(NamedTuple):
    """A row of bars."""

    label: str
    bars: list[Bar]
    length: int  # picoseconds of its step


def timelines(profile: ProfileFile, timeline: StepTimeline) -> str:
    """Predicted and measured lanes of each pipeline rank, each step over the whole width."""
    lanes = list[TimelineBars]()
    chosen = {row["pp_rank"]: row["rank"] for row in profile["ops"]}
    pp_ranks = sorted(chosen)
    for pp_rank in pp_ranks[: _MOST_RANKS // 2] + pp_ranks[_MOST_RANKS // 2 :][-_MOST_RANKS // 2 :]:
        lanes += _lanes(timeline, timeline["predicted"][pp_rank])
        lanes += _lanes(timeline, timeline["measured"][chosen[pp_rank]])
    height = (_LANE + 4) * len(lanes) + 6
    lines = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Predicted and measured timelines">']
    for i, lane in enumerate(lanes):
        y = i * (_LANE + 4) + 4
        lines.append(
            f'<text x="0" y="{y + 12}">{escape(lane.label)} <tspan class="soft">{show(lane.length)}</tspan></text>'
        )
        lines += (_bar(bar, y) for bar in joined(lane.bars))
    return "\n".join([*lines, "</svg>"])


def _bar(bar: Bar, y: int) -> str:
    room = _WIDTH - _LEFT
    x, width = _LEFT + bar.begin * room, max(0.3, (bar.end - bar.begin) * room)
    title = f"<title>{escape(bar.name)}</title>" if bar.name else ""
    colour = COLOURS.get(bar.part, "#888")
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" fill="{colour}">{title}</rect>'


def joined(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Bars of a lane in order; those that are narrower than a part of a pixel join with the next of their part."""
    least, now = _LEAST / (_WIDTH - _LEFT), None
    for bar in sorted(bars):
        if now is not None and bar.part == now.part and bar.begin - now.end < least:
            now = Bar(now.begin, max(now.end, bar.end), now.part, now.name if now.name == bar.name else "")
            continue
        if now is not None:
            yield now
        now = bar
    if now is not None:
        yield now


def _lanes(timeline: StepTimeline, lane: TimelineLane) -> Iterator[TimelineBars]:
    """The compute stream, and what runs beside it."""
    whole, names, at = lane["picoseconds"], timeline["names"], 0
    compute, other = list[Bar](), list[Bar]()

    def bar(place: int, begin: int, length: int) -> Bar:
        return Bar(begin / whole, (begin + length) / whole, names[place]["part"], names[place]["name"])

    for place, length in zip(lane["compute"][::2], lane["compute"][1::2], strict=True):
        if names[place]["name"]:
            compute.append(bar(place, at, length))
        at += length
    for stream in lane["streams"]:
        spans = stream["spans"]
        for place, begin, length in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            part = bar(place, begin, length)
            other.append(part._replace(part="host") if stream["kind"] == "copy" else part)
    rank = lane["rank"]
    yield TimelineBars(
        f"pipeline rank {lane['pp_rank']} predicted" if rank is None else f"rank {rank} measured", compute, whole
    )
    if other:
        yield TimelineBars("    its collectives", other, whole)
