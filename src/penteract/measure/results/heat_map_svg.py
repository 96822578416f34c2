"""Heat maps drawn as one SVG file: a row for each metric, a panel for each pp, dp over tp."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from penteract.measure.results.colour_scale import colour, is_dark
from penteract.measure.results.heat_map import HeatCell, HeatMap, Metric
from penteract.units import show_whole

CELL_W, CELL_H, LEFT, TOP, GAP, HEAD, FOOT, BAR = 74, 40, 64, 66, 34, 42, 34, 96
_NONE, _INK, _SOFT = "#eceff1", "#1c2733", "#5c6b78"


def to_svg(maps: HeatMap) -> str:
    """The picture as text. Each cell has its case, memory and speed as a tooltip."""
    panel_w, panel_h = len(maps.tp) * CELL_W, len(maps.dp) * CELL_H
    width = max(LEFT + len(maps.pp) * (panel_w + GAP) + BAR, 9 * len(maps.title) + LEFT)
    row_h = HEAD + panel_h + FOOT
    height = TOP + len(maps.metrics) * row_h
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 28, maps.title, size=16, weight=600),
        _text(LEFT, 48, "each cell: the fastest case of its mesh", fill=_SOFT, size=12),
    ]
    for i, metric in enumerate(maps.metrics):
        lines += _metric(maps, metric, TOP + i * row_h, panel_w, panel_h)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _metric(maps: HeatMap, metric: Metric, top: int, panel_w: int, panel_h: int) -> Iterator[str]:
    values = [cell.values[metric] for cell in maps.cells.values() if metric in cell.values]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    yield _text(LEFT, top + 12, metric, weight=600)
    for column, pp in enumerate(maps.pp):
        x, y = LEFT + column * (panel_w + GAP), top + HEAD
        yield _text(x + panel_w / 2, y - 7, f"pp = {pp}", fill=_SOFT, anchor="middle")
        for j, dp in enumerate(maps.dp):
            if not column:
                yield _text(x - 8, y + (j + 0.5) * CELL_H + 4, f"dp = {dp}", fill=_SOFT, anchor="end")
            for i, tp in enumerate(maps.tp):
                yield from _cell(maps.cells.get((pp, dp, tp)), metric, low, high, x + i * CELL_W, y + j * CELL_H)
        for i, tp in enumerate(maps.tp):
            yield _text(x + (i + 0.5) * CELL_W, y + panel_h + 17, f"tp = {tp}", fill=_SOFT, anchor="middle")
    if values:
        yield from _bar(LEFT + len(maps.pp) * (panel_w + GAP), top + HEAD, panel_h, low, high)


def _cell(cell: HeatCell | None, metric: Metric, low: float, high: float, x: float, y: float) -> Iterator[str]:
    """A filled cell with its number; grey with a word where no speed counts; nothing where there is no case."""
    if cell is None:
        return
    value = cell.values.get(metric)
    rgb = None if value is None else colour((value - low) / (high - low) if high > low else 1.0)
    fill = _NONE if rgb is None else f"rgb{rgb}"
    yield "<g>"
    yield f"<title>{escape(_about(cell))}</title>"
    yield f'<rect x="{x + 1}" y="{y + 1}" width="{CELL_W - 2}" height="{CELL_H - 2}" rx="3" fill="{fill}"/>'
    ink = _SOFT if rgb is None else "#ffffff" if is_dark(rgb) else _INK
    text = number(value) if value is not None else cell.word or "-"
    yield _text(
        x + CELL_W / 2, y + CELL_H / 2 + 5, text, fill=ink, anchor="middle", size=13 if value is not None else 11
    )
    yield "</g>"


def _about(cell: HeatCell) -> str:
    case, error = cell.row.case, cell.row.status.error
    lines = [case.name, case.layout_text, *(f"{metric}: {number(value)}" for metric, value in cell.values.items())]
    if not cell.values:
        lines.append(f"{cell.row.status.state}: {error['what']}" if error else cell.row.status.state)
    return "\n".join([*lines, f"and {cell.others} more of this mesh"] if cell.others else lines)


def _bar(x: float, y: float, height: float, low: float, high: float) -> Iterator[str]:
    """The scale: the highest on top."""
    steps = 24
    for i in range(steps):
        rgb, at = colour(1 - (i + 0.5) / steps), y + i * height / steps
        yield f'<rect x="{x}" y="{at:.2f}" width="12" height="{height / steps + 0.4:.2f}" fill="rgb{rgb}"/>'
    yield _text(x + 18, y + 11, number(high), fill=_SOFT, size=12)
    if high > low:
        yield _text(x + 18, y + height, number(low), fill=_SOFT, size=12)


def number(value: float) -> str:
    """A number of at most four digits or so."""
    return show_whole(value) if value >= 1000 else f"{value:.3g}"


def _text(
    x: float, y: float, text: str, *, fill: str = _INK, size: int = 13, anchor: str = "start", weight: int = 400
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
