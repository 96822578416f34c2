"""The step of every pipeline rank in time: passes, bubbles, what is not hidden, messages, and what is in flight.

All of it is what the simulated clock emits: no order and no duration is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penteract.config.layout import Layout
from penteract.explore.amounts import amount, moments
from penteract.explore.answers.memory_figures import by_owner, rank_label
from penteract.explore.answers.questions import changed
from penteract.explore.answers.schedules.lane_kinds import KINDS
from penteract.explore.answers.schedules.lane_parts import PICO, LaneParts, blocks, in_flight, lane_time, spans
from penteract.explore.answers.step_curve import shortened, shown_note
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Fact, Question
from penteract.explore.schemas.schedule_schema import LaneKind, RankLane, ScheduleAnswer
from penteract.planner.plan import Plan
from penteract.planner.report.as_text import headline
from penteract.planner.search.best import Timed
from penteract.readings.time.timelines.timeline import Event, StepSpan, emit_events
from penteract.schedule.in_flight import compute_lists, most_in_flight
from penteract.schedule.registry import schedule_of
from penteract.units import show_step, show_whole

_PARTS, _MOST = 3000, 32_000  # of the time axis, and of all lanes: what is shorter is joined to its neighbours
_MISSING = ("There is one pipeline rank, so there is one lane, and it waits for no other. With pp of 2 or more "
            "there is a lane for each pipeline rank.")  # fmt: skip
_MANY = 64  # micro-batches that are shown of a step whose forwards all come first
_EXPOSED = ("tensor", "context", "expert", "data", "host")  # parts of a step in which compute waits for bytes


def schedule_lanes(page: Question, plan: Plan, timed: Timed, at: int) -> ScheduleAnswer:
    """Every pipeline rank's step. Of many micro-batches, as many are simulated as fill the pipeline and a few more.
    `at`: the rank that is looked into."""
    lay, prices = timed.layout, plan.search.estimators[timed.estimate.precision]
    short = few(lay)
    ranks = [LaneParts() for _ in range(lay.pp)]

    def emit(e: Event) -> None:
        ranks[e.pp_rank].event(e)

    span = emit_events(prices.steps, short, emit)
    lanes = [_lane(plan, timed, short, span, pp_rank, parts) for pp_rank, parts in enumerate(ranks)]
    for lane in lanes:
        lane["shown"] = lane["pp_rank"] == at
    end, most = max(lane["end"] for lane in lanes), max(lane["most"] for lane in lanes)
    return {
        "version": VERSION, "kind": "schedule", "question": page, "schedule": lay.schedule, "bubble": bubble(timed),
        "verdict": _verdict(timed), "headline": headline(plan), "facts": _facts(timed), "kinds": _kinds(lanes),
        "lanes": lanes, "end": end, "marks": moments(end * PICO), "most": most,
        "seconds": show_step(span.picoseconds * PICO), "note": _note(lay, short, timed),
        "missing": _MISSING if lay.pp == 1 else "", "more": _more(page, lay),
    }  # fmt: skip


def _more(page: Question, lay: Layout) -> Question | None:
    """A question with more lanes, where there is one: on the same GPUs if their number allows it."""
    if lay.pp > 1:
        return None
    return changed(page, {"pp": 2, "dp": lay.dp // 2 if lay.dp % 2 == 0 else lay.dp})


def bubble(timed: Timed) -> str:
    """The bubble's share of the step, as `penteract plan` prints it."""
    share = timed.time.parts.get("pipeline", 0.0) / timed.time.seconds
    return f"{share:.1%}" if timed.layout.pp > 1 else "-"


def _verdict(timed: Timed) -> str:
    lay, waits = timed.layout, timed.time.parts.get("pipeline", 0.0)
    if lay.pp == 1:
        return "There is no pipeline, so there is no bubble."
    return f"Of {show_step(timed.time.seconds)}, the rank that ends last waits {show_step(waits)} for others."


def _note(layout: Layout, short: Layout, timed: Timed) -> str:
    """Which micro-batches are shown, and what this changes."""
    note = shown_note(layout, short, timed.time.seconds)
    if note and not schedule_of(layout.schedule).alternates:
        note += " Each of them is in flight too."
    return f"{note} So bubbles have a larger share of the lanes than of the step." if note and layout.pp > 1 else note


def few(layout: Layout) -> Layout:
    """The layout with the micro-batches that lanes show. Where all forwards come first, each further one is in flight
    too, so that no part shows all: many are shown."""
    short = shortened(layout)
    if schedule_of(layout.schedule).alternates or layout.gradient_accumulation_steps <= _MANY:
        return short
    turn = schedule_of(layout.schedule).round(layout.pp)
    return replace(layout, gradient_accumulation_steps=-(-_MANY // turn) * turn)


def most_in_flight_of(layout: Layout) -> int:
    """The most micro-batches in flight on any rank, of the whole step, as the schedule has it."""
    last = "Wgt" if schedule_of(layout.schedule).split_backward else "Bwd"
    passes = tuple([(chunk, ("Fwd", last)) for chunk in range(layout.vpp)])
    return max(most_in_flight(layout.schedule, layout.pp, layout.vpp, layout.gradient_accumulation_steps, passes))


def _facts(timed: Timed) -> list[Fact]:
    lay, parts, seconds = timed.layout, timed.time.parts, timed.time.seconds
    waits = sum(parts.get(part, 0.0) for part in _EXPOSED)
    modelled = "simulated with measured rates"
    chunks = [{"label": "Chunks a rank", "text": str(lay.vpp), "source": "vpp"}] if lay.vpp > 1 else []
    facts: list[Fact] = [
        {"label": "Step", "text": show_step(seconds), "source": modelled},
        {"label": "Exposed communication", "text": f"{waits / seconds:.1%}",
         "source": "waits for collectives and copies, of the whole step"},
        {"label": "Schedule", "text": lay.schedule if lay.pp > 1 else "-", "source": "the order of passes"},
        {"label": "Micro-batches a step", "text": show_whole(lay.gradient_accumulation_steps),
         "source": "batch ÷ (dp · micro-batch)"},
        {"label": "Most in flight", "text": show_whole(most_in_flight_of(lay)), "source": "counted from the schedule"},
    ]  # fmt: skip
    return facts + [Fact(**one) for one in chunks]


def _lane(plan: Plan, timed: Timed, short: Layout, span: StepSpan, pp_rank: int, parts: LaneParts) -> RankLane:
    begin = span.begins[pp_rank]
    end, least = begin + span.picoseconds, -(-span.picoseconds // min(_PARTS, _MOST // short.pp))
    lists = compute_lists(short.schedule, short.pp, short.vpp, short.gradient_accumulation_steps)[pp_rank]
    whole = list(parts.whole(begin))
    found = blocks(whole, least, lists)
    others, sums = spans(parts, begin, end, least)
    for interval in whole:
        sums[interval.kind] += interval.end - interval.start
    flight = in_flight(found, lists)
    price = plan.search.estimators[timed.estimate.precision].composer.rank(timed.layout, pp_rank)
    gpus = timed.layout.world // timed.layout.pp
    return {
        "pp_rank": pp_rank, "label": rank_label(timed, pp_rank), "gpus": f"{show_whole(gpus)} GPU{'s' * (gpus > 1)}",
        "begin": begin, "end": end, "blocks": found, "other_streams": others,
        "times": [lane_time(sums[number], span.picoseconds) for number in range(len(KINDS))],
        "flight": flight, "most": max(flight[1::2], default=0), "activations": amount(by_owner(price)["activations"]),
        "shown": False,
    }  # fmt: skip


def _kinds(lanes: Sequence[RankLane]) -> list[LaneKind]:
    """The kinds, with the time of all lanes."""
    whole, sums = sum(lane["end"] - lane["begin"] for lane in lanes), Counter[int]()
    for lane in lanes:
        sums.update({number: time["picoseconds"] for number, time in enumerate(lane["times"])})
    all_of_them = [lane_time(sums[number], whole) for number in range(len(KINDS))]
    return [
        {"name": one.name, "label": one.label, "about": one.about, "other_stream": one.other_stream,
         "seconds": time["text"], "share": time["share"]}
        for one, time in zip(KINDS, all_of_them, strict=True)
    ]  # fmt: skip
