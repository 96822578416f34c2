"""Where the time of a layout goes, from ideal to predicted; and two layouts side by side: what differs, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penteract.errors import BadInput
from penteract.explore.amounts import amount, change, share
from penteract.explore.answers.layouts.asked import Wanted
from penteract.explore.answers.layouts.points import settings_of
from penteract.explore.answers.memory_figures import by_owner
from penteract.explore.answers.questions import read_question
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import WaterfallStep
from penteract.explore.schemas.search_schema import CompareAnswer, Difference, LayoutSide
from penteract.planner.plan import Plan, estimator, plan_one
from penteract.planner.report.as_json import MEMORY, utilisation
from penteract.planner.report.explain import changed_settings, difference
from penteract.planner.report.memory_by_line import fullest_pp_rank
from penteract.planner.report.waterfall import waterfall
from penteract.readings.ideal import PART_NAMES
from penteract.units import show_bytes, show_pace, show_step, show_whole

_PS = 10**12
_OWNERS = {"parameters": "Parameters", "gradients": "Gradients", "optimizer": "Optimizer",
           "activations": "Activations", "other": "Other"}  # fmt: skip


def side_by_side(wanted: Wanted) -> CompareAnswer:
    """The chosen layout, and the other one if there is one. Raises BadInput for a layout that breaks rules."""
    page, against = wanted.asked.page, wanted.options["against"]
    plans = [_priced(wanted, page["layout"])]
    if against is not None:
        plans.append(_priced(wanted, against))
    sides = [_side(wanted, plan) for plan in plans]
    return {
        "version": VERSION, "kind": "compare", "question": page, "command": wanted.asked.command, "sides": sides,
        "most": max(side["picoseconds"] for side in sides),
        "differences": [*_of_time(*plans), *_of_memory(*sides)] if len(plans) > 1 else [],
        "why": _why(*plans) if len(plans) > 1 else [],
    }  # fmt: skip


def _priced(wanted: Wanted, layout: Mapping[str, object]) -> Plan:
    asked = read_question({**wanted.asked.page, "layout": dict(layout)})
    if asked.ask.cluster.gpus != wanted.ask.cluster.gpus:
        raise BadInput("LAYOUT", "layouts of other GPUs", where="--layout", found=asked.ask.cluster.name,
                       allowed=wanted.ask.cluster.name)  # fmt: skip
    return plan_one(asked.ask, asked.settings, estimator)


def _side(wanted: Wanted, plan: Plan) -> LayoutSide:
    timed, used = plan.best, utilisation(plan, plan.best).mfu
    waterfall, pp_rank, name = _waterfall(plan), fullest_pp_rank(timed), plan.ask.text(timed.layout)
    sizes = by_owner(plan.search.estimators[timed.estimate.precision].composer.rank(timed.layout, pp_rank))
    usable, fits = plan.ask.usable, plan.fits(timed.estimate)
    return {
        "name": name, "layout": settings_of(name), "amount": amount(timed.estimate.allocated),
        "verdict": f"{'fits' if fits else 'does not fit'}: {show_bytes(timed.estimate.allocated)} of "
                   f"{show_bytes(usable)}", "fits": fits,
        "seconds": timed.time.seconds, "step": show_step(timed.time.seconds),
        "speed": f"{show_whole(plan.rate(timed))} tokens/s/GPU", "mfu": "-" if used is None else f"{used:.1%}",
        "limited_by": timed.time.limited_by, "cost": wanted.cost(plan, timed),
        "picoseconds": sum(step["picoseconds"] for step in waterfall), "waterfall": waterfall,
        "owners": [amount(sizes[owner]) for owner in MEMORY],
    }  # fmt: skip


def _waterfall(plan: Plan) -> list[WaterfallStep]:
    """The step from ideal to predicted."""
    rows = waterfall(plan.search.estimators[plan.best.estimate.precision], plan.best)
    whole = sum(row.picoseconds for row in rows)
    return [
        {"name": row.name, "label": row.label, "about": row.about, "level": row.name == "ideal",
         "picoseconds": row.picoseconds,
         "text": show_step(row.picoseconds / _PS).replace("-", "−"), "share": share(row.picoseconds, whole)}
        for row in rows
    ]  # fmt: skip


def _of_time(a: Plan, b: Plan) -> Iterator[Difference]:
    """What differs in the step, the largest first."""
    for part, seconds in difference(a.best, b.best):
        was, now = (one.best.time.parts.get(part, 0.0) for one in (a, b))
        yield {
            "what": "time", "name": part, "label": PART_NAMES[part], "chosen": show_step(was), "other": show_step(now),
            "change": show_step(seconds, "+").replace("-", "−"), "size": seconds,
        }  # fmt: skip


def _of_memory(a: LayoutSide, b: LayoutSide) -> list[Difference]:
    """What differs in the memory of the fullest ranks, the largest first."""
    found: list[Difference] = [
        {"what": "memory", "name": name, "label": _OWNERS[name], "chosen": was["text"], "other": now["text"],
         "change": change(now["bytes"] - was["bytes"]), "size": now["bytes"] - was["bytes"]}
        for name, was, now in zip(MEMORY, a["owners"], b["owners"], strict=True)
        if was["bytes"] != now["bytes"]
    ]  # fmt: skip
    return sorted(found, key=lambda one: -abs(one["size"]))


def _why(a: Plan, b: Plan) -> list[str]:
    """Which settings differ, and what that does to time and to memory."""
    one, other = a.best, b.best
    slower = show_pace(other.time.seconds / one.time.seconds, verb=True)
    grown = other.estimate.allocated - one.estimate.allocated
    parts = ", ".join(f"{PART_NAMES[part]} {show_step(s, '+')}" for part, s in difference(one, other)[:4])
    settings = changed_settings(one.layout, other.layout)
    time = slower + (f": {parts}" if parts else "")
    memory = f"{show_bytes(abs(grown))} {'more' if grown > 0 else 'less'}" if grown else "the same"
    which = f"Other settings: {settings}." if settings else "Both are the same layout."
    return [which, f"The other {time}.".replace("-", "−"),
            f"The other's memory of the fullest rank is {memory}."]  # fmt: skip
