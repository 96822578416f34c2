"""Draws docs/picture.svg: five dimensions, one program, two readings.

    python docs/picture.py

The left half is a penteract (32 corners, 80 edges) seen along the axis from which its outline is a decagon: the edges
of one direction, and of one dimension of parallelism, share a colour.
"""

from __future__ import annotations

from itertools import product
from math import cos, pi, sin
from pathlib import Path

WIDTH, HEIGHT = 1000, 440
INK, FAINT, PAPER, BOX = "#1f2430", "#6b7280", "#fcfcfa", "#ffffff"
DIMENSIONS = (
    ("dp", "data", "#2f6fbb"),
    ("tp", "tensor", "#c8553d"),
    ("pp", "pipeline", "#3a8f5c"),
    ("cp", "context", "#8a5bb0"),
    ("ep", "expert", "#c99a2e"),
)
FONT = "font-family='Helvetica, Arial, sans-serif'"
MONO = "font-family='Menlo, Consolas, monospace'"


def text(
    x: float, y: float, words: str, *, size: int = 14, fill: str = INK, anchor: str = "middle", font: str = FONT
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' {font}>{words}</text>"
    )


def cube(cx: float, cy: float, reach: float) -> list[str]:
    """The 80 edges and 32 corners around (cx, cy)."""
    turns = [pi / 2 + 2 * pi * k / 10 for k in range(5)]

    def at(corner: tuple[int, ...]) -> tuple[float, float]:
        x = sum(s * cos(t) for s, t in zip(corner, turns, strict=True))
        y = sum(s * sin(t) for s, t in zip(corner, turns, strict=True))
        return cx + reach * x, cy - reach * y

    out: list[str] = []
    corners = list(product((-1, 1), repeat=5))
    for axis, (_, _, colour) in enumerate(DIMENSIONS):
        for low in (c for c in corners if c[axis] < 0):
            high = (*low[:axis], 1, *low[axis + 1 :])
            (x1, y1), (x2, y2) = at(low), at(high)
            out.append(
                f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
                f"stroke-width='1.6' stroke-opacity='0.75'/>"
            )
    out += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{INK}'/>" for x, y in map(at, corners)]
    return out


def legend(cx: float, y: float) -> list[str]:
    out: list[str] = []
    for i, (short, name, colour) in enumerate(DIMENSIONS):
        x = cx + (i - 2) * 76
        out.append(text(x, y, short, size=15, fill=colour, font=f"{MONO} font-weight='bold'"))
        out.append(text(x, y + 17, name, size=12, fill=FAINT))
    return out


def box(x: float, y: float, w: float, h: float, title: str, below: str, where: str = "") -> list[str]:
    """A box centred on (x, y); `where`: the folder that holds it."""
    lines = [f"<rect x='{x - w / 2}' y='{y - h / 2}' width='{w}' height='{h}' rx='7' fill='{BOX}' stroke='{INK}'/>"]
    lines.append(text(x, y - 4 if below else y + 5, title, size=15, font=f"{FONT} font-weight='bold'"))
    if below:
        lines.append(text(x, y + 14, below, size=12, fill=FAINT))
    if where:
        lines.append(text(x, y - h / 2 - 7, where, size=11, fill=FAINT, font=MONO))
    return lines


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.3' marker-end='url(#tip)'/>"


def program() -> list[str]:
    """From what is written to what it takes and what it does."""
    left, middle, right = 530, 700, 870
    out = [*box(left, 62, 140, 50, "network", "block, attention, …", "model/")]
    out += box(middle, 62, 140, 50, "dimensions", "pairs of collectives", "parallel/")
    out += box(right, 62, 140, 50, "schedule", "lists of actions", "schedule/")
    out += [
        arrow(left + 20, 87, middle - 74, 139),
        arrow(middle, 87, middle, 137),
        arrow(right - 20, 87, middle + 74, 139),
    ]
    out += box(middle, 170, 330, 62, "one program for each rank", "recorded, edited, written out as instructions")
    out += [arrow(middle - 60, 201, 592, 256), arrow(middle + 60, 201, 808, 256)]
    out += box(580, 288, 200, 60, "price it", "sizes for tensors; no torch")
    out += box(820, 288, 200, 60, "run it", "tensors: gloo or NCCL")
    out += [text(580, 347, "bytes, seconds, formulas:", size=13), text(580, 364, "what it will take", size=13)]
    out += [text(820, 347, "loss, gradients, traffic:", size=13), text(820, 364, "what it took", size=13)]
    out.append(text(middle, 297, "=", size=26))
    out.append(
        text(
            middle,
            408,
            "held against each other by the tests: the same bytes, alive and on the wire",
            size=13,
            fill=FAINT,
        )
    )
    return out


def picture() -> str:
    tip = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{INK}'/></marker></defs>"
    )
    title = "A five-dimensional cube; beside it, one program with two readings"
    parts = [*cube(215, 190, 52), *legend(215, 398), *program()]
    frame = f"<rect width='{WIDTH}' height='{HEIGHT}' rx='10' fill='{PAPER}'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>"
    return "\n".join([head, f"<title>{title}</title>", tip, frame, *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("picture.svg").write_text(picture(), encoding="utf-8")
