"""Cases as points of any two numbers, and the front: those of which no other is better in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penteract.explore.measured_sweeps.case_table import CaseColumn, CaseTable
from penteract.explore.measured_sweeps.scales import axis
from penteract.explore.schemas.bench_schema import BenchAxis, BenchPoints
from penteract.units import show_whole

_DIGITS = 5  # of a place: a pixel of any screen


def case_points(
    table: CaseTable, cases: Sequence[int], across: CaseColumn, up: CaseColumn, *, equal: bool = False
) -> BenchPoints | None:
    """The cases that have both numbers. `equal`: both axes have the same ends, so that equal numbers are a diagonal;
    None where no case has both."""
    some = [i for i in cases if across.values[i] is not None and up.values[i] is not None]
    assert across.kind is not None and up.kind is not None
    if not some:
        return None
    scale = up.kind.base / across.kind.base  # an equal axis is in the unit of the one across
    xs, ys = [across.number(i) or 0.0 for i in some], [(up.number(i) or 0.0) * (scale if equal else 1) for i in some]
    both = [*xs, *ys]
    x0, x1, x_ticks = axis(across.kind, min(both if equal else xs), max(both if equal else xs))
    y0, y1, y_ticks = (x0, x1, x_ticks) if equal else axis(up.kind, min(ys), max(ys))
    front = [] if equal else front_of(xs, ys, [table.good[i] for i in some], (across.kind.better, up.kind.better))
    least: Literal["across", "up", ""] = "" if not front else "across" if across.kind.better == "least" else "up"
    bad = sum(not table.good[i] for i in some)
    said = f"{show_whole(len(some))} of {show_whole(len(cases))} cases have both numbers"
    x_axis: BenchAxis = {"label": across.label, "source": across.source, "ticks": x_ticks}
    y_axis: BenchAxis = {"label": up.label, "source": up.source, "ticks": y_ticks}
    return {
        "across": x_axis, "up": y_axis, "names": [table.names[i] for i in some],
        "x": [round((x - x0) / (x1 - x0), _DIGITS) for x in xs],
        "y": [round((y - y0) / (y1 - y0), _DIGITS) for y in ys],
        "across_texts": [across.text(i) for i in some], "up_texts": [up.text(i) for i in some],
        "good": [table.good[i] for i in some], "front": front, "first": least,
        "text": "; ".join((said, *[f"{show_whole(bad)} of these do not count"] * bool(bad),
                           *([] if equal else [_front_text(across, up, len(front))]))),
    }  # fmt: skip


def _front_text(across: CaseColumn, up: CaseColumn, count: int) -> str:
    assert across.kind is not None and up.kind is not None
    if not across.kind.better or not up.kind.better:
        return "there is no front: of one of them neither more nor less is better"
    words = {"most": "more", "least": "less"}
    better = f"{words[across.kind.better]} {across.label}, {words[up.kind.better]} {up.label}"
    return f"the front has {show_whole(count)}: no case is better in both ({better})"


def front_of(xs: Sequence[float], ys: Sequence[float], good: Sequence[bool], better: tuple[str, str]) -> list[int]:
    """The places of the cases of which no other is better in one number and no worse in the other, by x. `better`: most
    or least, of each; else there is none."""
    if "" in better:
        return []
    sx, sy = (1.0 if one == "most" else -1.0 for one in better)
    found, most = list[int](), float("-inf")
    for i in sorted(range(len(xs)), key=lambda i: (-sx * xs[i], -sy * ys[i])):
        if good[i] and sy * ys[i] > most:
            found.append(i)
            most = sy * ys[i]
    return sorted(found, key=lambda i: xs[i])
