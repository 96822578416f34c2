"""Changes of one layout, each priced by itself: what would make it fit, or leave more room, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.errors import BadInput
from penteract.explore.amounts import amount, change, difference
from penteract.explore.answers.questions import changed, read_question
from penteract.explore.schemas.page_schema import VERSION, FitAnswer, FitsEnd, Question
from penteract.planner.ask import as_settings, budget_of
from penteract.planner.plan import Plan, estimator, plan_one
from penteract.planner.report.smaller_layouts import GROUPS
from penteract.planner.search.best import Timed

_PLAIN = {"recompute": "none", "recompute_every": 1, "recompute_first": 0, "recompute_else": "none"}


def would_fit(page: Question, plan: Plan, timed: Timed) -> Iterator[FitAnswer | FitsEnd]:
    """Each change as soon as it is priced; last, how many there were."""
    tried = refused = fit = 0
    for group, changes_of_group in GROUPS:
        for text, changes in changes_of_group(plan, timed.layout):
            if (other := changed(page, changes)) == page:
                continue
            tried += 1
            try:
                asked = read_question(other)
                found = plan_one(asked.ask, asked.settings, estimator)
            except BadInput:
                refused += 1
                continue
            if budget_of(str(changes.get("recompute", ""))):
                other = changed(
                    page,
                    {setting: as_settings(found.best.layout).get(setting, plain) for setting, plain in _PLAIN.items()},
                )
            answer = _answer(group, text, other, found, timed)
            fit += answer["fits"]
            yield answer
    text = f"{tried} changes were tried: {fit} fit, {tried - refused - fit} do not, {refused} cannot be"
    yield {"version": VERSION, "kind": "fits_end", "tried": tried, "refused": refused, "text": text}


def _answer(group: str, text: str, page: Question, found: Plan, before: Timed) -> FitAnswer:
    timed = found.best
    size, seconds = timed.estimate.allocated, timed.time.seconds
    was = before.time.seconds
    return {
        "version": VERSION, "kind": "fit", "group": group, "text": text, "fits": found.fits(timed.estimate),
        "amount": amount(size),        "memory": change(size - before.estimate.allocated), "seconds": seconds,
        "time": difference(seconds, was), "question": page,
    }  # fmt: skip
