"""The recipe for a schedule is followed: one value, and nothing else has to know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from layouts import Case, Verdict, run_case
from penteract.api import plan
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.legal import problems
from penteract.engine.comm.groups import ProcessGroups
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.time.step import StepClock
from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.check import check
from penteract.schedule.draw import draw
from penteract.schedule.registry import SCHEDULES, generate
from penteract.schedule.schedule import Schedule, round_robin
from penteract.schedule.transfers import with_transfers
from pool import Pool
from readings.test_composed import check as equals_the_walk
from tiny import SIZES

DENSE = ModelSpec(**SIZES)


def _in_waves(pp: int, vpp: int, micro_batches: int) -> list[ComputeList]:
    """GPipe over pp micro-batches, again and again: at most pp of them are in flight."""
    one: ComputeList = []
    for first in range(0, micro_batches, pp):
        some = range(first, min(first + pp, micro_batches))
        one += [*(Compute("Fwd", m) for m in some), *(Compute("Bwd", m) for m in some)]
    return [list(one) for _ in range(pp)]


WAVES = Schedule(name="waves", compute=_in_waves, needs_multiple_of_pp=True, period=lambda pp, vpp: pp)


@contextmanager
def waves_known() -> Iterator[None]:
    with patch.dict(SCHEDULES, {WAVES.name: WAVES}):
        yield


def run_waves(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with waves_known():
        return run_case(rank, groups, case)


def test_a_schedule_is_one_value(pool: Pool) -> None:
    """Proven, drawn, legal or blamed, priced, timed, planned and run."""
    layout = Layout(pp=2, schedule="waves", gradient_accumulation_steps=4, dp=2, zero=1)
    with waves_known():
        lists, placement = generate("waves", 2, 1, 4), round_robin(2, 1)
        report = check(with_transfers(lists, placement), placement, 4)
        assert report.in_flight_peak == (2, 2)
        assert draw(lists, placement, 4).splitlines() == [
            "rank 0  F0 F1 .. .. .. B0 -- B1 -- F2 F3 .. .. .. B2 -- B3 --",
            "rank 1  .. F0 F1 B0 -- B1 -- .. .. .. F2 F3 B2 -- B3 -- .. ..",
            "bubble 33.3% of 18 time units (F: 1; B: 2, with --); peak micro-batches in flight by rank: 2 2",
        ]
        assert not problems(DENSE, layout, 16)
        assert problems(DENSE, replace(layout, gradient_accumulation_steps=3), 16)
        equals_the_walk(DENSE, layout, 16, RECIPES["bf16"], PLAIN)
        node = cluster("8xH100")
        composer, rates = Composer(DENSE, 16, "bf16"), Rates.of(node, "bf16")
        long = replace(layout, gradient_accumulation_steps=40)
        jumped = StepClock(composer, node, rates).seconds(long)
        assert jumped == StepClock(composer, node, rates, skip_repeats=False).seconds(long)
        found = plan("tiny", "8xH100", sequence_length=256, batch="64seqs", fix="pp=2,schedule=waves")
        assert {timed.layout.schedule for timed in found.layouts} == {"waves"}
    assert not [v for v in pool.run(run_waves, Case(DENSE, layout)) if v.red]
