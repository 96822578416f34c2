"""What if: the best layouts of other questions, on other cards, on more of them, with shorter sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from penteract.config.catalog.hardware import tables
from penteract.errors import BadInput
from penteract.explore.amounts import amount
from penteract.explore.answers.layouts.asked import Wanted, searched
from penteract.explore.answers.layouts.points import settings_of
from penteract.explore.answers.questions import DEGREES, changed, read_question
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Question
from penteract.explore.schemas.search_schema import WhatIfAnswer
from penteract.planner.plan import Plan, estimator, plan_layouts
from penteract.planner.search.best import Search
from penteract.units import show_step, show_whole

_CARDS = 3  # others that are tried, the nearest in memory
_KEPT = 32  # answers
_plans: dict[str, Plan | BadInput] = {}


def other_questions(wanted: Wanted) -> Iterator[WhatIfAnswer]:
    """Each question as soon as its search is done. The same values are held, and the same training is paid for."""
    here = _plan(wanted)
    for text, changes in _changes(wanted):
        page = _asked(wanted.asked.page, changes)
        try:
            other = searched(read_question(page), wanted.options)
        except BadInput as error:
            yield _nothing(text, str(error))
            continue
        yield _answer(text, page, other, _plan(other), here)


def _changes(wanted: Wanted) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is asked otherwise. Sequences change with their number: a step keeps its tokens."""
    page, gpus = wanted.asked.page, wanted.ask.cluster.gpus
    yield f"{2 * gpus} GPUs", {"world": 2 * gpus}
    if gpus % 2 == 0:
        yield f"{gpus // 2} GPUs", {"world": gpus // 2}
    length, batch = page["sequence_length"], page["global_batch_size"]
    if length % 2 == 0:
        yield f"sequences of {length // 2}", {"sequence_length": length // 2, "global_batch_size": 2 * batch}
    if batch % 2 == 0 and 2 * length <= wanted.ask.model.max_positions:
        yield f"sequences of {2 * length}", {"sequence_length": 2 * length, "global_batch_size": batch // 2}
    now = wanted.ask.cluster.memory_gib
    others = {name: float(row["memory_gib"]) for name, row in tables("gpus").items() if name != page["gpu"]}
    near = sorted(others, key=lambda name: (max(others[name] / now, now / others[name]), name))[:_CARDS]
    yield from ((f"{gpus} × {name}", {"gpu": name}) for name in near)


def _asked(page: Question, changes: Mapping[str, Any]) -> Question:
    """The question with changes; `world`: another number of GPUs, here all of them in dp."""
    rest = {name: value for name, value in changes.items() if name != "world"}
    other = changed(page, rest)
    if "world" in changes:
        other["layout"] = {"dp": changes["world"]}
    return other


def _plan(wanted: Wanted) -> Plan | BadInput:
    """The best layout of a question, or why there is none."""
    page = {**wanted.asked.page, "layout": {}}
    key = json.dumps([page, wanted.ask.cluster.name, wanted.options["fix"]], sort_keys=True)
    if key not in _plans:
        try:
            found = plan_layouts(wanted.ask, estimator, top=1)
            kept: Plan | BadInput = found.refusal or replace(found, search=Search({}))
        except BadInput as error:
            kept = error
        while len(_plans) >= _KEPT:
            del _plans[next(iter(_plans))]
        _plans[key] = kept
    return _plans[key]


def _nothing(text: str, why: str) -> WhatIfAnswer:
    return {
        "version": VERSION, "kind": "what_if", "text": text, "why_not": why, "name": "", "amount": amount(0),
        "seconds": 0.0, "step": "", "speed": "", "change": "", "cost": "", "question": None,
    }  # fmt: skip


def _answer(text: str, page: Question, wanted: Wanted, plan: Plan | BadInput, here: Plan | BadInput) -> WhatIfAnswer:
    """The best of another question, against the best of this one."""
    if isinstance(plan, BadInput):
        return _nothing(text, str(plan))
    best = plan.best
    name, rate = wanted.ask.text(best.layout), plan.rate(best)
    was = 0.0 if isinstance(here, BadInput) else here.rate(here.best)
    layout = {axis: 1 for axis in DEGREES} | settings_of(name)
    assert prod(int(layout[axis]) for axis in DEGREES) == wanted.ask.cluster.gpus
    return {
        **_nothing(text, ""), "name": name, "amount": amount(best.estimate.allocated), "seconds": best.time.seconds,
        "step": show_step(best.time.seconds), "speed": f"{show_whole(rate)} tokens/s/GPU",
        "change": f"{rate / was - 1:+.1%}".replace("-", "−") if was else "", "cost": wanted.cost(plan, best),
        "question": {**page, "layout": layout},
    }  # fmt: skip
