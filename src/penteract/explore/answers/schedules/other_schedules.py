"""The same layout under each schedule of the registry, each priced by itself."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.config.layout import Layout
from penteract.errors import BadInput
from penteract.explore.amounts import amount, change, difference
from penteract.explore.answers.questions import changed, read_question
from penteract.explore.answers.schedules.schedule_lanes import bubble
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Question
from penteract.explore.schemas.schedule_schema import ScheduleChoice
from penteract.planner.plan import estimator, plan_one
from penteract.planner.search.best import Timed
from penteract.schedule.registry import SCHEDULES
from penteract.schedule.schedule import Schedule
from penteract.units import show_step


def other_schedules(page: Question, before: Timed) -> Iterator[ScheduleChoice]:
    """Each schedule as soon as it is priced, with as many chunks a rank as it takes: now's, if it may. Without a
    pipeline there is nothing to choose."""
    if before.layout.pp == 1:
        return
    for schedule in SCHEDULES.values():
        other = page
        if schedule.name != before.layout.schedule:
            other = changed(page, {"schedule": schedule.name, "vpp": _chunks(schedule, before.layout)})
        yield _choice(schedule.name, other, before)


def _chunks(schedule: Schedule, now: Layout) -> int:
    return int(min(max(now.vpp, schedule.min_vpp), schedule.max_vpp))


def _choice(name: str, page: Question, before: Timed) -> ScheduleChoice:
    same = name == before.layout.schedule
    found: ScheduleChoice = {
        "version": VERSION, "kind": "schedule_choice", "name": name, "now": same, "why_not": "", "fits": False,
        "bubble": "", "amount": amount(0), "memory": "", "seconds": 0.0, "step": "", "time": "", "question": None,
    }  # fmt: skip
    try:
        asked = read_question(page)
        plan = plan_one(asked.ask, asked.settings, estimator)
    except BadInput as error:
        return {**found, "why_not": error.what}
    timed, was = plan.best, before.time.seconds
    size, seconds = timed.estimate.allocated, timed.time.seconds
    return {
        **found, "fits": plan.fits(timed.estimate), "bubble": bubble(timed), "amount": amount(size),
        "memory": change(size - before.estimate.allocated), "seconds": seconds, "step": show_step(seconds),
        "time": difference(seconds, was), "question": page,
    }  # fmt: skip
