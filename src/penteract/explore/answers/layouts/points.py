"""Priced layouts as points of memory and speed, the front of those that were simulated, and the axes around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor

from penteract.explore.amounts import amount, bytes_axis, nice
from penteract.explore.schemas.page_schema import ChartAxis
from penteract.explore.schemas.page_values import Value
from penteract.explore.schemas.search_schema import LayoutPoint, RankedLayout
from penteract.planner.ask import parse_settings
from penteract.planner.plan import Plan
from penteract.planner.report.as_json import budget, utilisation
from penteract.planner.search.best import Timed
from penteract.readings.estimator import LayoutEstimate
from penteract.units import GIB, Bytes, Seconds, show_step, show_whole

_MOST = 20_000  # points of layouts that were not simulated
_MISSES = 200  # points of layouts that do not fit
_ROOM = 1.06  # of an axis beyond what it shows


def settings_of(name: str) -> dict[str, Value]:
    """The text of a layout, as in `--layout`, as settings of a question."""
    read = parse_settings(name, flag="--layout", several=False)
    return {setting: values[0] if isinstance(values[0], bool | int | str) else "+".join(values[0]) or "none"
            for setting, values in read.items()}  # fmt: skip


def point(plan: Plan, estimate: LayoutEstimate, timed: Timed | None) -> LayoutPoint:
    """A layout as a point. Without `timed`, by the bound of its time."""
    name = plan.ask.text(estimate.layout)
    seconds: Seconds = timed.time.seconds if timed else estimate.at_least
    rate = plan.ask.tokens / seconds / estimate.layout.world if timed is None else plan.rate(timed)
    mark = "" if timed else "at most "
    return {
        "name": name, "layout": settings_of(name), "amount": amount(estimate.allocated), "seconds": seconds,
        "step": f"{'' if timed else 'at least '}{show_step(seconds)}", "rate": rate,
        "speed": f"{mark}{show_whole(rate)} tokens/s/GPU", "simulated": timed is not None,
        "fits": plan.fits(estimate), "front": False,
    }  # fmt: skip


def points(plan: Plan, timed: Iterable[Timed]) -> list[LayoutPoint]:
    """All that a search has priced: `timed`, others that fit, by their bound, and the nearest that do not fit."""
    simulated = {(one.layout, one.estimate.precision): one for one in timed}
    found = [point(plan, one.estimate, one) for one in simulated.values()]
    mark_front(found)
    others = [q for q in plan.search.estimates if (q.layout, q.precision) not in simulated]
    found += [point(plan, q, None) for q in sorted(others, key=lambda q: q.at_least)[:_MOST]]
    nearest = sorted(plan.missed, key=lambda miss: miss.size)[:_MISSES]
    estimators = plan.search.estimators
    missed = [estimators[miss.precision].estimate(miss.layout) for miss in nearest]
    return found + [point(plan, q, None) for q in missed if not plan.fits(q)]


def mark_front(found: Sequence[LayoutPoint]) -> None:
    """Mark the simulated layouts that fit, of which none is as fast with less memory."""
    least: Bytes | None = None
    for one in sorted(found, key=lambda p: (p["seconds"], p["amount"]["bytes"])):
        if one["simulated"] and one["fits"]:
            one["front"] = least is None or one["amount"]["bytes"] < least
            least = one["amount"]["bytes"] if one["front"] else least


def memory_axis(plan: Plan, found: Sequence[LayoutPoint]) -> tuple[ChartAxis, bool]:
    """The axis of memory: up to the largest point, but no farther than half again the card. -> the axis, and whether
    the card's line is on it."""
    card = int(plan.ask.cluster.memory_gib * GIB)
    most = max((one["amount"]["bytes"] for one in found), default=card)
    return bytes_axis(min(most, 3 * card // 2) if card else most, card)


def speed_axis(found: Sequence[LayoutPoint]) -> ChartAxis:
    """The axis of speed: up to the fastest that was simulated, or the fastest bound if none was."""
    some = [one["rate"] for one in found if one["simulated"]] or [one["rate"] for one in found] or [1.0]
    end = _ROOM * max(some)
    step = nice(end)
    ticks = [n * step for n in range(floor(end / step) + 1)]
    return {"most": end, "ticks": [{"at": at, "text": show_whole(at)} for at in ticks]}


def ranked(plan: Plan, number: int, timed: Timed, tokens: int, usd: float | None) -> RankedLayout:
    """A row of the table, with what `penteract plan` prints of it."""
    used = utilisation(plan, timed).mfu
    bubble = timed.time.parts.get("pipeline", 0.0) / timed.time.seconds
    cost = budget(plan, timed, tokens, usd) if tokens else None
    return {
        "number": number, "point": point(plan, timed.estimate, timed), "mfu": "-" if used is None else f"{used:.1%}",
        "bubble": f"{bubble:.1%}" if timed.layout.pp > 1 else "-", "limited_by": timed.time.limited_by,
        "hours": show_whole(cost.gpu_hours) if cost else "", "days": show_whole(cost.days, 1) if cost else "",
        "usd": show_whole(cost.usd) if cost and cost.usd is not None else "",
    }  # fmt: skip
