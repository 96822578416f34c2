"""Draws docs/timeline.svg: the step of pipeline rank 0 as `penteract plan --trace` plays it, whole and a part.

python docs/timeline.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from penteract import plan
from penteract.readings.time.timelines.timeline import Event, timeline
from penteract.readings.time.timelines.trace import kind

MODEL, GPUS, LENGTH, BATCH, LAYOUT = "llama-3.1-8b", "8xH200", 8192, "8seqs", "tp=2,pp=4"
WIDTH, LEFT, ROW = 1100, 170, 26
INK, FAINT, PAPER, LANE = "#1f2430", "#6b7280", "#fcfcfa", "#eeeeea"
COLOURS = {
    "forward": ("forward", "#2f6fbb"),
    "input_gradient": ("input gradient", "#3a8f5c"),
    "weight_gradient": ("weight gradient", "#8fbf6a"),
    "wait": ("waiting", "#d9b8b0"),
    "communication": ("communication", "#c8553d"),
    "bucket": ("buckets, update", "#8a5bb0"),
    "launch": ("launching", "#9aa1ac"),
}
FONT = "font-family='Helvetica, Arial, sans-serif'"


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {FONT}>{words}</text>"
    )


def drawn(events: list[Event], streams: list[str], top: float, begin: int, end: int) -> list[str]:
    """Streams as rows, from one moment to another. What is too narrow to be seen is one block with its neighbours."""
    scale, out = (WIDTH - LEFT - 20) / (end - begin), list[str]()
    for i, stream in enumerate(streams):
        y = top + i * ROW
        out.append(text(LEFT - 8, y + 15, stream, anchor="end"))
        out.append(f"<rect x='{LEFT}' y='{y}' width='{WIDTH - LEFT - 20}' height='{ROW - 6}' fill='{LANE}'/>")
        blocks = list[tuple[float, float, str, str]]()
        for e in (e for e in events if e.stream == stream and e.end > begin and e.start < end):
            x, until = LEFT + (max(e.start, begin) - begin) * scale, LEFT + (min(e.end, end) - begin) * scale
            word = e.name.split(" (")[0].removeprefix(f"{kind(e)} ").removeprefix("start ").removeprefix("finish ")
            if blocks and blocks[-1][2] == kind(e) and x - blocks[-1][1] < 0.4 and until - blocks[-1][0] < 3:
                blocks[-1] = (blocks[-1][0], until, kind(e), "")
            elif until - x >= 0.05:
                blocks.append((x, until, kind(e), word))
        for x, until, of, word in blocks:
            out.append(
                f"<rect x='{x:.1f}' y='{y}' width='{max(0.3, until - x - 0.3):.1f}' height='{ROW - 6}' "
                f"fill='{COLOURS[of][1]}'/>"
            )
            if word and until - x > 6.2 * len(word):
                out.append(text((x + until) / 2, y + 14, word, size=10, fill=PAPER, anchor="middle"))
    return out


def axis(y: float, begin: int, end: int) -> list[str]:
    each = (WIDTH - LEFT - 20) / 5
    return [
        text(LEFT + i * each, y, f"{(begin + (end - begin) * i / 5) / 1e9:.1f} ms", size=11, fill=FAINT, anchor=anchor)
        for i, anchor in enumerate(("start", *["middle"] * 4, "end"))
    ]


def actions(events: list[Event], y: float, end: int) -> list[str]:
    """The name of each action, above it."""
    spans = dict[str, tuple[int, int]]()
    for e in events:
        if e.stream == "compute" and e.action and kind(e) != "wait":
            spans[e.action] = (spans.get(e.action, (e.start, 0))[0], e.end)
    scale = (WIDTH - LEFT - 20) / end
    return [text(LEFT + (a + b) / 2 * scale, y, name, size=11, anchor="middle") for name, (a, b) in spans.items()]


def picture() -> str:
    found = plan(MODEL, GPUS, sequence_length=LENGTH, batch=BATCH, layout=LAYOUT)
    told = timeline(found.estimator.steps, found.best.layout)
    events = [e for e in told.of(0) if e.start < e.end]
    streams = sorted({e.stream for e in events}, key=lambda s: (s != "compute", s != "host", s))
    whole = told.span.begins[0] + told.picoseconds
    layer = [e for e in events if e.stream == "compute" and e.action == "F3" and e.unit == "layer 2"]
    begin, end = layer[0].start, layer[-1].end
    high = len(streams) * ROW
    second = 78 + high + 70
    out = [
        text(20, 26, f"Stage 0 of {LAYOUT}: {MODEL}, {GPUS}, {LENGTH} tokens, {BATCH.removesuffix('seqs')} sequences: "
             f"a step of {told.picoseconds / 1e9:.0f} ms", size=15),
        *actions(events, 56, whole), *drawn(events, streams, 62, 0, whole), *axis(62 + high + 10, 0, whole),
        text(20, second - 14, f"One layer forward, {(end - begin) / 1e9:.1f} ms of it", size=15),
        *drawn(events, streams, second, begin, end), *axis(second + high + 10, begin, end),
    ]  # fmt: skip
    x, y = float(LEFT), second + high + 40
    for words, colour in COLOURS.values():
        out += [f"<rect x='{x:.1f}' y='{y - 10}' width='12' height='12' fill='{colour}'/>", text(x + 17, y, words)]
        x += 40 + 7 * len(words)
    tall = y + 16
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {tall}' width='{WIDTH}' height='{tall}'>"
    return "\n".join([head, f"<rect width='{WIDTH}' height='{tall}' fill='{PAPER}'/>", *out, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "timeline.svg").write_text(picture(), encoding="utf-8")
