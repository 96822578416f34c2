"""A schedule is one value: those of `tests/schedules.py`, known nowhere else, are proven, priced, timed and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import Case
from penteract.api import plan
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.legal import problems
from penteract.errors import Bug
from penteract.planner.space.layouts import Space
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.time.lower_bounds.bounds import Bounds
from penteract.readings.time.step import StepClock
from penteract.schedule.check import check
from penteract.schedule.in_flight import _most, action_lists, most_in_flight
from penteract.schedule.registry import SCHEDULES
from penteract.schedule.schedule import Placement, Schedule
from pool import Pool
from readings.test_clock import check as plays_what_a_run_does
from readings.test_composed import check as equals_the_walk
from schedule.legal_sizes import legal_sizes
from schedules import BACKWARDS, DEEP, NEW, V_SHAPED, registered, run_registered
from tiny import SIZES

NODE = cluster("8xH100")
DENSE = ModelSpec(**SIZES | {"layers": 9})
TIED = replace(DENSE, tied=True)
every_one = pytest.mark.parametrize("schedule", NEW, ids=lambda s: s.name)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


def layout(schedule: Schedule, pp: int, rounds: int, **more: int) -> Layout:
    return Layout(pp=pp, vpp=schedule.min_vpp, schedule=schedule.name, gradient_accumulation_steps=pp * rounds, **more)


@every_one
@settings(max_examples=30)
@given(st.data())
def test_is_sound(schedule: Schedule, data: st.DataObject) -> None:
    sizes = _, pp, vpp, micros = data.draw(legal_sizes((schedule.name,), pp=6, micros=40))
    check(action_lists(*sizes), schedule.placement(pp, vpp), micros)
    members = tuple((c, ("Fwd", "Bwd")) for c in range(vpp))
    assert most_in_flight(*sizes, members) == _most(*sizes, members)


@every_one
@pytest.mark.parametrize("model", [DENSE, TIED], ids=["dense", "tied"])
@pytest.mark.parametrize("zero", [1, 3])
def test_is_legal_and_priced_as_its_walk(schedule: Schedule, model: ModelSpec, zero: int) -> None:
    lay = layout(schedule, 3, 2, dp=2, zero=zero)
    assert not problems(model, lay, 16)
    wrong = problems(model, replace(lay, vpp=2 if schedule is DEEP else 1), 16)[0]
    assert wrong.setting == ("schedule" if schedule is DEEP else "vpp")  # others take two chunks
    equals_the_walk(model, lay, 16, RECIPES["bf16"], PLAIN)


@every_one
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("rounds", [1, 30])
def test_is_timed_as_if_no_turn_were_jumped(schedule: Schedule, zero: int, rounds: int) -> None:
    composer, rates = Composer(TIED, 16, "bf16"), Rates.of(NODE, "bf16")
    lay = layout(schedule, 4, rounds, dp=2, zero=zero)
    steps = StepClock(composer, NODE, rates)
    assert steps.seconds(lay) == StepClock(composer, NODE, rates, skip_repeats=False).seconds(lay)
    assert 0 < Bounds(steps).of(lay) <= steps.seconds(lay)


@every_one
@pytest.mark.parametrize("rank", range(3))
def test_is_timed_by_what_a_run_does(schedule: Schedule, rank: int) -> None:
    plays_what_a_run_does(Case(TIED, layout(schedule, 3, 1, dp=2, zero=3), precision="bf16"), rank)


@every_one
def test_is_planned(schedule: Schedule) -> None:
    """Among the others, and by itself."""
    found = plan("tiny", "8xH100", sequence_length=256, batch="64seqs", fix=f"pp=2,schedule={schedule.name}")
    assert {timed.layout.schedule for timed in found.layouts} == {schedule.name}
    pipelines = Space(replace(found.ask, pins={})).pipelines(2)
    assert (schedule.name, schedule.min_vpp) in [(one.schedule, one.vpp) for one in pipelines]


@pytest.mark.parametrize("case", [
    Case(DENSE, layout(DEEP, 3, 2)),
    Case(DENSE, layout(BACKWARDS, 2, 2, dp=2, zero=3)),
    Case(TIED, layout(BACKWARDS, 3, 1, tp=2, zero=1)),
    Case(DENSE, layout(V_SHAPED, 3, 1, tp=2)),
    Case(TIED, layout(V_SHAPED, 2, 2, dp=2, zero=1)),
    Case(replace(TIED, mtp_layers=1), layout(V_SHAPED, 2, 1, dp=2, zero=3)),
], ids=["deep", "backwards, zero 3", "backwards, tied", "v", "v, tied", "v, zero 3"])  # fmt: skip
def test_takes_the_step_of_one_process(pool: Pool, case: Case) -> None:
    red = [f"rank {rank}: {v}" for rank, v in enumerate(pool.run(run_registered, case)) if v.red]
    assert not red, "\n".join([repr(case), *red])


@pytest.mark.parametrize("stages", [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((0, 1), (2,)), ((0, 2), (1, 4))])
def test_what_is_no_placement_is_refused(stages: tuple[tuple[int, ...], ...]) -> None:
    """A stage twice, descending on a rank, ranks of unlike length, a stage left out."""
    with pytest.raises(Bug, match="not a placement"):
        Placement(stages)


def test_every_placement_knows_the_way_back() -> None:
    for schedule in SCHEDULES.values():
        placement = schedule.placement(3, schedule.min_vpp)
        for stage, (rank, chunk) in enumerate(placement.locations):
            assert placement.stages[rank][chunk] == stage
