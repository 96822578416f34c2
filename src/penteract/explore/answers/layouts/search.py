"""The search of a question, as `penteract plan` makes it: its progress, its result, and then the front of memory and
speed, each step of which is a search too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penteract.explore.amounts import card_of
from penteract.explore.answers.layouts.asked import Wanted, filters
from penteract.explore.answers.layouts.points import memory_axis, point, points, ranked, speed_axis
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Fact
from penteract.explore.schemas.search_schema import FrontStep, LayoutPoint, SearchAnswer, SearchEnd, SearchProgress
from penteract.planner.plan import Plan, SearchCounts, estimator, plan_layouts
from penteract.planner.report.as_text import headline, nothing_fits, packages_needed_by
from penteract.planner.search.best import Search, Timed
from penteract.planner.search.progress import Progress, Pulse
from penteract.units import show_bytes, show_count, show_pace, show_whole

_LESS = 0.9  # memory of the next step of the front, at most
_STEPS = 24  # of the front, at most

_Row = SearchAnswer | FrontStep | SearchEnd


class _Kept(NamedTuple):
    """The last search: other prices, and a page that comes back to it, need no other one. `drawn`: what it had priced,
    without what the front has added since."""

    key: str
    plan: Plan
    drawn: list[LayoutPoint]


_last: list[_Kept] = []


def search_answers(wanted: Wanted, tell: Callable[[SearchProgress], object] | None) -> Iterator[_Row]:
    """The best layouts, then the front, step by step, and all points. `tell`: gets the best so far as it searches."""
    _, plan, drawn = _kept(wanted, tell)
    simulated = {one.estimate.layout: one for one in plan.layouts}
    yield _answer(wanted, plan, drawn)
    for step in _front(plan):
        simulated.setdefault(step.estimate.layout, step)
        was = plan.best
        less = show_bytes(was.estimate.allocated - step.estimate.allocated)
        slower = show_pace(step.time.seconds / was.time.seconds)
        yield {
            "version": VERSION, "kind": "front_step", "point": point(plan, step.estimate, step),
            "text": f"{less} less than the best, {slower}",
        }  # fmt: skip
    last = points(plan, simulated.values())
    memory, _ = memory_axis(plan, last)
    front = sum(one["front"] for one in last)
    yield {
        "version": VERSION, "kind": "search_end", "points": last, "memory": memory, "speed": speed_axis(last),
        "text": f"{show_whole(len(last))} layouts are drawn; {show_whole(front)} are on the front",
    }  # fmt: skip


def _kept(wanted: Wanted, tell: Callable[[SearchProgress], object] | None) -> _Kept:
    """The planner's search; the last one, if the question is the same but for its costs and its chosen layout."""
    page = {**wanted.asked.page, "layout": {}}
    key = json.dumps([page, wanted.ask.cluster.name, wanted.options["fix"]], sort_keys=True)
    if not _last or _last[0].key != key:
        _last.clear()

        def watch(now: Progress) -> None:
            if tell:
                tell(_progress(wanted, now))

        plan = plan_layouts(wanted.ask, estimator, watch=watch if tell else None)
        plan.search.pulse = Pulse()  # what follows is not watched
        _last.append(_Kept(key, plan, points(plan, plan.layouts)))
    return _last[0]


def _progress(wanted: Wanted, now: Progress) -> SearchProgress:
    """How far the search is, and its best layout."""
    text = f"{show_whole(now.priced)} layouts priced, {show_whole(now.left)} left; most of these need no price"
    counts = SearchCounts(0, {}, now.priced, 0, 0)
    plan = Plan(wanted.ask, counts, (now.best,) if now.best else (), Search({}))
    best = point(plan, now.best.estimate, now.best) if now.best else None
    return {"version": VERSION, "kind": "search_progress", "text": text, "best": best}


def _front(plan: Plan) -> Iterator[Timed]:
    """Each time the fastest layout with a tenth less memory than the one before, until there is none."""
    if not plan.layouts:
        return
    most = _LESS * plan.best.estimate.allocated
    for _ in range(_STEPS):
        limit = most
        found = plan.search.best(1, among=lambda q, limit=limit: q.allocated <= limit, slower_too=True)
        if not found:
            return
        yield found[0]
        most = _LESS * found[0].estimate.allocated


def _answer(wanted: Wanted, plan: Plan, drawn: list[LayoutPoint]) -> SearchAnswer:
    """The result of the search."""
    counts = plan.counts
    memory, line = memory_axis(plan, drawn)
    top = [ranked(plan, n, timed, wanted.tokens, wanted.usd) for n, timed in enumerate(plan.layouts, start=1)]
    return {
        "version": VERSION, "kind": "search", "question": wanted.asked.page, "search": wanted.options,
        "command": wanted.command, "headline": headline(plan),
        "number": show_whole(plan.rate(plan.best)) if top else "Nothing fits",
        "verdict": _verdict(plan), "fits": bool(top), "facts": _facts(wanted, plan),
        "found": f"{show_whole(counts.enumerated)} layouts: {show_whole(counts.priced)} priced, "
                 f"{show_whole(counts.fit)} fit, {show_whole(counts.simulated)} simulated",
        "notes": [*plan.notes, *packages_needed_by(plan), *([] if top else nothing_fits(plan).splitlines())],
        "top": top, "points": drawn,
        "left_out": [{"count": n, "text": show_whole(n), "why": why} for why, n in counts.refused.items() if n],
        "filters": filters(wanted.ask), "card": card_of(wanted.ask, drawn=line), "memory": memory,
        "speed": speed_axis(drawn),
    }  # fmt: skip


def _verdict(plan: Plan) -> str:
    if not plan.layouts:
        return str(plan.refusal)
    best = plan.best
    return f"The best is {plan.ask.text(best.layout)}: {show_bytes(best.estimate.allocated)} a GPU."


def _facts(wanted: Wanted, plan: Plan) -> list[Fact]:
    """How many layouts there are, and what the best costs."""
    counts = plan.counts
    facts: list[Fact] = [
        {"label": "Layouts", "text": show_whole(counts.enumerated), "source": "ways to split the step on these GPUs"},
        {"label": "Priced", "text": show_whole(counts.priced), "source": "the others are slower by a lower bound"},
        {"label": "Fit", "text": show_whole(counts.fit), "source": "within the memory that tensors may take"},
        {"label": "Simulated", "text": show_whole(counts.simulated), "source": "with measured rates"},
    ]  # fmt: skip
    if plan.layouts and wanted.tokens:
        row = ranked(plan, 1, plan.best, wanted.tokens, wanted.usd)
        source = f"{show_count(wanted.tokens)} tokens at the speed of the best, without pauses and failures"
        facts.append({"label": "GPU-hours", "text": row["hours"], "source": source})
        facts.append({"label": "Days", "text": row["days"], "source": source})
        if row["usd"]:
            facts.append({"label": "USD", "text": row["usd"], "source": source})
    return facts
