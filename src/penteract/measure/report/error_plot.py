"""A plot of errors over what was measured, as SVG: it is read on a page, so it needs no package to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 60, 16, 30, 44


class ErrorPoint(NamedTuple):
    """A row: what was measured, its error (predicted over measured, less 1), its name, whether it is drawn filled."""

    measured: float
    error: float
    name: str
    filled: bool


def error_plot(title: str, unit: str, points: Sequence[ErrorPoint]) -> str:
    """The picture of at least one point. Measured values are on a logarithmic axis, errors in percent."""
    low, high = (math.log10(f(p.measured for p in points)) for f in (min, max))
    low, high = low - 0.05, high + 0.05
    span = max(0.001, 1.1 * max(abs(p.error) for p in points))

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(error: float) -> float:
        return _TOP + (span - error) / (2 * span) * (_HEIGHT - _TOP - _BOTTOM)

    step = _step(span)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12"'
        ' font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for k in range(-int(span / step), int(span / step) + 1):
        at, color = y(k * step), "#555" if k == 0 else "#ddd"
        lines.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" stroke="{color}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{100 * k * step:+.3g} %</text>')
    for tick in _ticks(low, high):
        lines.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{tick:,g}</text>')
    lines.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">measured, {escape(unit)}</text>')
    for p in points:
        fill = "#0969da" if p.filled else "none"
        lines.append(
            f'<circle cx="{x(p.measured):.1f}" cy="{y(p.error):.1f}" r="4" fill="{fill}" fill-opacity="0.6"'
            f' stroke="#0969da"><title>{escape(p.name)}: {100 * p.error:+.2f} %</title></circle>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _step(span: float) -> float:
    """A round distance of lines, three to seven on each side."""
    power = 10 ** math.floor(math.log10(span))
    return next(power * part for part in (0.5, 0.2, 0.1) if span / (power * part) >= 2)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    every = [part * 10.0**decade for decade in decades for part in (1, 2, 5)]
    return [tick for tick in every if low <= math.log10(tick) <= high]
