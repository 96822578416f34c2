"""Messages stand where they can move, and are grouped without a new wait."""

from __future__ import annotations

import pytest
from hypothesis import given

from draws import draws
from penteract.errors import Bug
from penteract.schedule.actions import ActionList, Compute, ComputeList, P2PBatch
from penteract.schedule.check import check
from penteract.schedule.in_flight import _most_of, _times
from penteract.schedule.registry import SCHEDULES, generate, schedule_of
from penteract.schedule.schedule import round_robin
from penteract.schedule.transfers import with_transfers
from schedule.legal_sizes import Sizes, legal_sizes


def test_a_small_pipeline_in_full() -> None:
    first, last = with_transfers(generate("1f1b", 2, 1, 2), round_robin(2, 1))
    assert [str(a) for a in first] == [
        "F0",
        "[Send value 0 to rank 1]",
        "F1",
        "[Send value 1 to rank 1, Recv gradient 0 from rank 1]",
        "B0",
        "[Recv gradient 1 from rank 1]",
        "B1",
    ]
    assert [str(a) for a in last] == [
        "[Recv value 0 from rank 0]",
        "F0",
        "[Recv value 1 from rank 0]",
        "B0",
        "[Send gradient 0 to rank 0]",
        "F1",
        "B1",
        "[Send gradient 1 to rank 0]",
    ]


def test_a_value_comes_round_to_the_next_chunk() -> None:
    first, last = with_transfers(generate("interleaved", 2, 2, 2), round_robin(2, 2))
    sent = [str(t) for a in last if isinstance(a, P2PBatch) for t in a.transfers if t.kind == "Send"]
    got = [str(t) for a in first if isinstance(a, P2PBatch) for t in a.transfers if t.kind == "Recv"]
    assert sent[:2] == ["Send value 0 to rank 0", "Send value 1 to rank 0"]
    assert got[:2] == ["Recv value 0.1 from rank 1", "Recv value 1.1 from rank 1"]


@draws(25, wide=400)
@given(legal_sizes(tuple(SCHEDULES)))
def test_grouping_is_a_freedom_not_a_need(case: Sizes) -> None:
    """One transfer at a time in the listed order is sound as well, and as fast: groups never carry the proof."""
    name, pp, vpp, micro_batches = case
    computed, placement = generate(name, pp, vpp, micro_batches), schedule_of(name).placement(pp, vpp)
    grouped = with_transfers(computed, placement)
    apart: list[ActionList] = [
        [one for a in actions for one in ([P2PBatch((t,)) for t in a.transfers] if isinstance(a, P2PBatch) else [a])]
        for actions in grouped
    ]
    assert check(apart, placement, micro_batches).makespan == check(grouped, placement, micro_batches).makespan
    assert [[a for a in actions if not isinstance(a, P2PBatch)] for actions in grouped] == computed
    for actions in grouped:
        for a in actions:
            if isinstance(a, P2PBatch):
                assert len({(t.kind, t.peer) for t in a.transfers}) == len(a.transfers) > 0


def test_one_rank_sends_nothing() -> None:
    computed = generate("overlapped", 1, 1, 4)
    assert with_transfers(computed, round_robin(1, 1)) == computed


def test_lists_that_wait_for_each_other_are_refused() -> None:
    first: ComputeList = [Compute("Bwd", 0), Compute("Fwd", 0)]
    last: ComputeList = [Compute("Fwd", 0), Compute("Bwd", 0)]
    with pytest.raises(Bug, match="B0 can never start · rank 0"):
        with_transfers([first, last], round_robin(2, 1))


@given(legal_sizes(tuple(SCHEDULES), pp=4, vpp=3, micros=12))
def test_as_many_are_in_flight_between_computations_with_messages_and_without(case: Sizes) -> None:
    name, pp, vpp, micros = case
    kinds = ("Fwd", "Inp", "Wgt") if SCHEDULES[name].split_backward else ("Fwd", "Bwd")
    for rank in range(pp):
        times = [_times(name, pp, vpp, micros, rank, messages) for messages in (False, True)]
        for end in kinds:
            members = tuple((chunk, (kinds[0], end)) for chunk in range(vpp))
            alone, among = (_most_of(found, members) for found in times)
            assert alone == among > 0
