"""Every schedule is whole, free of deadlock, as fast and as small as the literature says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from penteract.schedule.actions import Compute
from penteract.schedule.check import Report, check
from penteract.schedule.registry import SCHEDULES, ScheduleName, breach, generate, schedule_of
from penteract.schedule.schedule import round_robin
from penteract.schedule.transfers import with_transfers
from schedule.legal_sizes import Sizes, legal_sizes

SIZES = st.integers(1, 8), st.integers(1, 4), st.integers(1, 16)
NAMES: tuple[ScheduleName, ...] = (*SCHEDULES, "overlapped")


def report(name: ScheduleName, pp: int, vpp: int, micro_batches: int) -> Report:
    placement = schedule_of(name).placement(pp, vpp)
    return check(with_transfers(generate(name, pp, vpp, micro_batches), placement), placement, micro_batches)


@draws(50, wide=750)
@given(legal_sizes(NAMES))
def test_every_legal_schedule_is_sound(case: Sizes) -> None:
    name, pp, vpp, micro_batches = case
    result = report(*case)
    assert result.in_flight_peak == tuple(peak(name, pp, vpp, micro_batches, rank) for rank in range(pp))
    assert 0 <= result.bubble < 1
    work = 3 * micro_batches * vpp
    assert result.bubble == pytest.approx(1 - work / result.makespan)


def peak(name: ScheduleName, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """The known in-flight peaks."""
    return {
        "gpipe": micro_batches * vpp,
        "1f1b": min(pp - rank, micro_batches),
        "interleaved": min((vpp - 1) * pp + 2 * (pp - 1 - rank) + 1, micro_batches * vpp),
        "zb_h1": min(pp, micro_batches),
        "overlapped": min(2, micro_batches),
    }[name]


@draws(20, wide=300)
@given(*SIZES)
def test_makespans_follow_the_papers(pp: int, vpp: int, micro_batches: int) -> None:
    ideal = 3 * (micro_batches + pp - 1)
    assert report("gpipe", pp, 1, micro_batches).makespan == ideal
    assert report("1f1b", pp, 1, micro_batches).makespan == ideal
    if micro_batches >= pp:
        assert report("zb_h1", pp, 1, micro_batches).makespan == 3 * micro_batches + pp - 1
    if breach("interleaved", pp, vpp, micro_batches) is None:
        assert report("interleaved", pp, vpp, micro_batches).makespan == 3 * (micro_batches * vpp + pp - 1)


@draws(15, wide=200)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 2))
def test_interleaving_and_splitting_shrink_the_bubble(pp: int, vpp: int, groups: int) -> None:
    plain = report("1f1b", pp, 1, groups * pp).bubble
    assert report("interleaved", pp, vpp, groups * pp).bubble < plain
    assert report("zb_h1", pp, 1, groups * pp).bubble < plain


def test_zero_bubble_is_never_slower_than_1f1b() -> None:
    for pp in range(1, 9):
        for micro_batches in range(1, 17):
            assert report("zb_h1", pp, 1, micro_batches).makespan <= report("1f1b", pp, 1, micro_batches).makespan


def test_costs_and_wire_time_are_counted() -> None:
    def cost(rank: int, compute: Compute) -> float:
        return (10.0 if compute.kind == "Fwd" else 20.0) + rank

    lists = with_transfers(generate("1f1b", 2, 1, 1), round_robin(2, 1))
    result = check(lists, round_robin(2, 1), 1, cost=cost, wire=0.5)
    assert result.makespan == 10 + 0.5 + 11 + 21 + 0.5 + 20
    assert result.bubble == pytest.approx(1 - 62 / (2 * 63))
    assert [(str(s.action), s.start, s.end) for s in result.spans[1]] == [
        ("[Recv value 0 from rank 0]", 0, 10.5),
        ("F0", 10.5, 21.5),
        ("B0", 21.5, 42.5),
        ("[Send gradient 0 to rank 0]", 42.5, 43.0),
    ]


@draws(20, wide=300)
@given(legal_sizes(tuple(SCHEDULES)), st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_no_cost_brings_a_deadlock(case: Sizes, times: list[float]) -> None:
    """The order is made with unit costs; other costs make it slower, never wrong."""
    name, pp, vpp, micro_batches = case
    kinds = dict(zip(("Fwd", "Bwd", "Inp", "Wgt"), times, strict=False))
    placement = schedule_of(name).placement(pp, vpp)
    lists = with_transfers(generate(name, pp, vpp, micro_batches), placement)
    result = check(lists, placement, micro_batches, cost=lambda _, c: kinds[c.kind], wire=times[4])
    assert result.in_flight_peak == report(*case).in_flight_peak
