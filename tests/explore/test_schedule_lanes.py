"""Lanes of the page: they are the plan's step and the schedule's passes, they add up, and every schedule has some."""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import Any

import pytest

from draws import more
from explore.drawn_questions import drawn, question
from explore.test_answers import OPENING, ask
from penteract.cli import main
from penteract.config.layout import Layout
from penteract.explore.answering import answer
from penteract.explore.answers.questions import read_question
from penteract.explore.answers.schedules.lane_kinds import KINDS, NUMBER
from penteract.explore.answers.schedules.schedule_lanes import few
from penteract.explore.answers.step_curve import shortened
from penteract.explore.schemas.page_schema import VERSION
from penteract.planner.plan import Plan, estimator, plan_one
from penteract.planner.report.as_text import table
from penteract.readings.time.timelines.joined import joined
from penteract.schedule.in_flight import most_in_flight
from penteract.schedule.registry import SCHEDULES, generate, schedule_of
from penteract.units import show_step
from schedules import NEW, registered

Json = dict[str, Any]
CHUNKS = question(layout="dp=2,pp=4,vpp=2,schedule=interleaved,mbs=1,zero=3", global_batch_size=32)
SPLIT = question(layout="dp=2,tp=2,pp=4,mbs=1,zero=1,schedule=zb_h1", global_batch_size=64)
QUESTIONS = more(6, wide=60)  # drawn; of which some break a rule
HOSTED = question(layout="dp=4,pp=2,mbs=1,zero=1,recompute=full,offload=layer_inputs", global_batch_size=32)


def planned(asked: Json) -> Plan:
    return _planned(json.dumps(asked))


@cache
def _planned(asked: str) -> Plan:
    found = read_question(json.loads(asked))
    return plan_one(found.ask, found.settings, estimator)


def legal(seeds: range) -> list[Json]:
    """Drawn questions that break no rule."""
    return [asked for seed in seeds if (row := ask("memory", asked := drawn(seed))[0]).get("figures") and row["plan"]]


def check(asked: Json) -> Json:
    """All that holds for every layout. -> the answer."""
    plan = planned(asked)
    timed = plan.best
    short = few(timed.layout)
    row = ask("schedule", asked)[0]
    seconds = plan.search.estimators[timed.estimate.precision].steps.step(short).seconds
    check_lanes(row, round(seconds * 10**12))
    check_passes(row, short)
    bubble = timed.time.parts.get("pipeline", 0.0) / timed.time.seconds
    assert row["bubble"] == (f"{bubble:.1%}" if timed.layout.pp > 1 else "-")
    if short == timed.layout:  # all of the step is shown: the lane that ends last has the plan's bubble
        waits = [lane["times"][NUMBER["idle"]]["picoseconds"] for lane in row["lanes"]]
        assert min(abs(n - timed.time.parts.get("pipeline", 0.0) * 1e12) for n in waits) < 10
    else:
        assert row["note"].startswith(f"{short.gradient_accumulation_steps} of ")
    return row


def check_lanes(row: Json, step: int) -> None:
    """Blocks follow each other from the begin to the end of every rank's step, and intervals and kinds add up to it."""
    others = [kind["other_stream"] for kind in row["kinds"]]
    for lane in row["lanes"]:
        assert lane["end"] - lane["begin"] == step
        ends = [lane["begin"], *(block["end"] for block in lane["blocks"])]
        assert [block["start"] for block in lane["blocks"]] == ends[:-1] and ends[-1] == lane["end"]
        for block in lane["blocks"]:
            assert sum(block["intervals"][1::2]) == block["end"] - block["start"] > 0
            assert not any(others[kind] for kind in block["intervals"][::2])
        times = [time["picoseconds"] for time in lane["times"]]
        assert sum(n for n, other in zip(times, others, strict=True) if not other) == step
        assert (
            sum(b["end"] - b["start"] for b in lane["blocks"] if b["kind"] == NUMBER["idle"]) == times[NUMBER["idle"]]
        )
        assert all(
            lane["begin"] <= s["start"] < s["end"] <= lane["end"] and others[s["kind"]] for s in lane["other_streams"]
        )
    assert row["end"] == max(lane["end"] for lane in row["lanes"]) and min(lane["begin"] for lane in row["lanes"]) == 0
    assert row["seconds"] == show_step(step * 1e-12)


def check_passes(row: Json, layout: Layout) -> None:
    """Passes are in the schedule's order, and as many are in flight as the schedule says."""
    sizes = layout.schedule, layout.pp, layout.vpp, layout.gradient_accumulation_steps
    last = "Wgt" if schedule_of(layout.schedule).split_backward else "Bwd"
    members = tuple((chunk, ("Fwd", last)) for chunk in range(layout.vpp))
    assert tuple(lane["most"] for lane in row["lanes"]) == most_in_flight(*sizes, members)
    for lane, passes in zip(row["lanes"], generate(*sizes), strict=True):
        assert [*dict.fromkeys(block["name"] for block in lane["blocks"] if block["name"])] == [str(p) for p in passes]
        counts, moments = lane["flight"][1::2], lane["flight"][::2]
        assert counts[-1] == 0 and max(counts) == lane["most"] and moments == sorted(moments)
        assert all(abs(b - a) == 1 for a, b in zip([0, *counts], counts, strict=False))
    assert row["most"] == max(lane["most"] for lane in row["lanes"])


@pytest.mark.wide(QUESTIONS)
def test_drawn_layouts() -> None:
    asked = legal(range(200, 200 + QUESTIONS))
    assert len(asked) > QUESTIONS // 2 and sum(one["layout"]["pp"] > 1 for one in asked) > QUESTIONS // 8
    for one in asked:
        check(one)


@pytest.mark.parametrize("asked", [CHUNKS, SPLIT, HOSTED], ids=["chunks", "split backward", "copies"])
def test_other_layouts(asked: Json) -> None:
    row = check(asked)
    at = {kind.name: NUMBER[kind.name] for kind in KINDS}
    lane = row["lanes"][1]
    spent = {name: lane["times"][i]["picoseconds"] for name, i in at.items()}
    assert spent["forward"] and spent["idle"] and spent["message"]
    assert bool(spent["copy"]) == (asked is HOSTED)
    assert {block["kind"] for block in lane["blocks"]} > {at["forward"], at["idle"]}
    passes = {block["name"][0] for block in lane["blocks"] if block["name"]}
    assert passes == ({*"FIW"} if asked is SPLIT else {*"FB"})


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_every_schedule_of_the_registry(name: str) -> None:
    schedule = SCHEDULES[name]
    layout = f"dp=1,pp=4,mbs=1,zero=0,schedule={name}" + f",vpp={schedule.min_vpp}" * (schedule.min_vpp > 1)
    for batch in (8, 32):
        row = check(question("gpt2", layout, sequence_length=256, global_batch_size=batch))
        assert row["schedule"] == name and len(row["lanes"]) == 4


def test_a_schedule_that_is_added_has_lanes_and_is_a_choice() -> None:
    with registered():
        for schedule in NEW:
            layout = f"dp=1,pp=2,mbs=1,zero=0,schedule={schedule.name}" + f",vpp={schedule.min_vpp}" * (
                schedule.min_vpp > 1
            )
            asked = question("tiny", layout, sequence_length=256, global_batch_size=8)
            check(asked)
            assert [row["name"] for row in ask("schedules", asked)] == [*SCHEDULES]


@pytest.mark.parametrize("asked", [CHUNKS, SPLIT])
def test_the_bubble_is_the_plans(asked: Json) -> None:
    row = ask("schedule", asked)[0]
    head, first = table(planned(asked)).splitlines()
    end = head.index("bubble") + len("bubble")
    assert first[:end].split()[-1] == row["bubble"]
    facts = {fact["label"]: fact["text"] for fact in row["facts"]}
    assert facts["Step"] == show_step(planned(asked).best.time.seconds)


def test_one_rank_is_one_lane_and_says_what_makes_more() -> None:
    row = check(question())
    assert len(row["lanes"]) == 1 and "With pp of 2 or more" in row["missing"] and row["bubble"] == "-"
    assert row["lanes"][0]["times"][NUMBER["idle"]]["picoseconds"] == 0
    assert ask("schedules", question()) == []
    more = check(row["more"])
    assert len(more["lanes"]) == 2 and more["missing"] == "" and more["more"] is None


def test_of_many_forwards_in_a_row_some_are_shown() -> None:
    """GPipe keeps every micro-batch, so no part of its step holds as much as the whole: the headline counts all."""
    asked = question("tiny", "dp=1,pp=2,mbs=1,schedule=gpipe", sequence_length=256, global_batch_size=96)
    row = check(asked)
    assert row["most"] == 64 and row["note"].startswith("64 of 96 micro-batches are shown: the others repeat them.")
    assert "in flight too" in row["note"]
    assert {fact["label"]: fact["text"] for fact in row["facts"]}["Most in flight"] == "96"
    assert shortened(planned(asked).best.layout) == planned(asked).best.layout  # its memory is that of all


def test_the_rank_that_is_looked_into_is_marked() -> None:
    assert [lane["shown"] for lane in ask("schedule", SPLIT, pp_rank=2)[0]["lanes"]] == [False, False, True, False]


def test_marks_of_the_axis_are_told_apart() -> None:
    for asked in (question(), SPLIT, question("tiny", "dp=1,pp=2,mbs=1", sequence_length=256, global_batch_size=4)):
        levels = ask("schedule", asked)[0]["marks"]
        for zoom, marks in enumerate(levels):
            assert len({mark["text"] for mark in marks}) == len(marks) <= 8 * 2**zoom + 1
            assert [mark["at"] for mark in marks] == sorted(mark["at"] for mark in marks) and marks[-1]["at"] <= 1
        assert len(levels[-1]) > 100


def test_each_schedule_is_priced_as_the_command_line_does(capsys: pytest.CaptureFixture[str]) -> None:
    """With as many micro-batches as pp divides, all are possible; else some say why not."""
    rows = ask("schedules", SPLIT)
    assert [row["name"] for row in rows] == [*SCHEDULES] and [row["name"] for row in rows if row["now"]] == ["zb_h1"]
    for row in rows:
        assert not row["why_not"]
        main([*shlex.split(read_question(row["question"]).command)[1:], "--json"])
        (layout,) = (told := json.loads(capsys.readouterr().out))["layouts"]
        assert layout["layout"]["schedule"] == row["name"] and layout["time"]["step_s"] == row["seconds"]
        assert layout["memory"]["allocated_gib"] * 2**30 == row["amount"]["bytes"]
        assert bool(told["counts"]["fit"]) == row["fits"]
        assert row["bubble"] == ask("schedule", row["question"])[0]["bubble"]
    odd = ask("schedules", question(layout="dp=2,pp=4,mbs=1,zero=1", global_batch_size=20))
    refused = [row for row in odd if row["why_not"]]
    assert [row["name"] for row in refused] == ["interleaved"]
    assert "multiple of pp = 4" in refused[0]["why_not"] and refused[0]["question"] is None


def test_short_pieces_are_joined_and_no_time_is_lost() -> None:
    parts = [(i % 3, length) for i, length in enumerate((5, 100, 3, 4, 2, 200, 9, 8))]
    found = joined(parts, 10)
    assert sum(found[1::2]) == sum(length for _, length in parts) and (1, 100) in zip(
        found[::2], found[1::2], strict=True
    )
    assert len(found) == 2 * 5
    assert joined(parts, 1) == [n for part in parts for n in part]


def test_a_layout_that_cannot_be_is_an_error_here_too() -> None:
    (row,) = answer({"version": VERSION, "kind": "schedule", "question": question(layout="dp=1,tp=3")}, OPENING)
    assert row["kind"] == "error"
