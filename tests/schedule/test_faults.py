"""The checker finds what is broken: every mutation of a sound schedule is a named fault."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from penteract.errors import Bug
from penteract.schedule.actions import ActionList, Compute, P2PBatch, Transfer
from penteract.schedule.check import check
from penteract.schedule.registry import ScheduleName, generate, schedule_of
from penteract.schedule.transfers import with_transfers
from schedules import registered

Case = tuple[ScheduleName, int, int, int]
CASES: list[Case] = [
    ("gpipe", 3, 2, 3),
    ("1f1b", 3, 1, 4),
    ("interleaved", 2, 2, 4),
    ("zb_h1", 3, 1, 4),
    ("overlapped", 1, 1, 3),
    ("gpipe_v", 3, 2, 3),
]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])


def sound(case: Case) -> list[ActionList]:
    name, pp, vpp, micro_batches = case
    return with_transfers(generate(name, pp, vpp, micro_batches), schedule_of(name).placement(pp, vpp))


def replaced(lists: list[ActionList], rank: int, actions: ActionList) -> list[ActionList]:
    return [actions if r == rank else other for r, other in enumerate(lists)]


def fault(lists: list[ActionList], case: Case) -> str:
    with pytest.raises(Bug) as caught:
        check(lists, schedule_of(case[0]).placement(*case[1:3]), case[3])
    assert caught.value.code == "SCHEDULE"
    return str(caught.value)


def places(lists: list[ActionList]) -> Iterator[tuple[int, int]]:
    return ((rank, i) for rank, actions in enumerate(lists) for i in range(len(actions)))


@every_case
def test_a_dropped_action(case: Case) -> None:
    lists = sound(case)
    for rank, i in places(lists):
        fault(replaced(lists, rank, lists[rank][:i] + lists[rank][i + 1 :]), case)


@every_case
def test_a_dropped_transfer(case: Case) -> None:
    lists = sound(case)
    for rank, i in places(lists):
        action = lists[rank][i]
        if not isinstance(action, P2PBatch):
            continue
        for gone in action.transfers:
            rest = P2PBatch(tuple(t for t in action.transfers if t is not gone))
            text = fault(replaced(lists, rank, [*lists[rank][:i], rest, *lists[rank][i + 1 :]]), case)
            assert f"rank {rank}" in text


@every_case
def test_a_doubled_action(case: Case) -> None:
    lists = sound(case)
    for rank, i in places(lists):
        for at in range(i, len(lists[rank])):
            again = [*lists[rank][: at + 1], lists[rank][i], *lists[rank][at + 1 :]]
            assert "comes twice" in fault(replaced(lists, rank, again), case)


@every_case
def test_two_transfers_swapped(case: Case) -> None:
    """Messages with one peer must keep their order, in whichever P2P batch they are."""
    lists = sound(case)
    for rank, actions in enumerate(lists):
        mine = [t for a in actions if isinstance(a, P2PBatch) for t in a.transfers]
        for one, two in combinations(mine, 2):
            if one.peer == two.peer:
                swap = {one: two, two: one}
                mutated: ActionList = [
                    P2PBatch(tuple(swap.get(t, t) for t in a.transfers)) if isinstance(a, P2PBatch) else a
                    for a in actions
                ]
                fault(replaced(lists, rank, mutated), case)


@every_case
def test_a_send_before_its_producer(case: Case) -> None:
    lists = sound(case)
    for rank, i in places(lists):
        action = lists[rank][i]
        if not isinstance(action, P2PBatch):
            continue
        for moved in (t for t in action.transfers if t.kind == "Send"):
            kinds = ("Fwd",) if moved.what == "value" else ("Bwd", "Inp")
            producer = next(
                j
                for j, a in enumerate(lists[rank])
                if isinstance(a, Compute) and a.kind in kinds and (a.micro, a.chunk) == (moved.micro, moved.chunk)
            )
            rest = P2PBatch(tuple(t for t in action.transfers if t is not moved))
            mutated = [*lists[rank][:i], rest, *lists[rank][i + 1 :]]
            mutated.insert(producer, P2PBatch((moved,)))
            assert f"{moved} comes before" in fault(replaced(lists, rank, mutated), case)


def test_rings_that_send_first_wait_for_each_other() -> None:
    """Pairwise orders agree and every rank by itself is right; only the walk of all ranks shows the cycle."""
    case: Case = ("gpipe", 3, 2, 4)
    apart: list[ActionList] = []
    for actions in sound(case):
        apart.append([])
        for action in actions:
            if isinstance(action, P2PBatch):
                send_first = sorted(action.transfers, key=lambda t: t.kind, reverse=True)
                apart[-1] += [P2PBatch((t,)) for t in send_first]
            else:
                apart[-1].append(action)
    text = fault(apart, case)
    assert "deadlock" in text
    for rank in range(3):
        assert f"rank {rank} waits in Send value" in text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (P2PBatch((Transfer("Send", "value", 0, 0, 0),)), "leaves the pipeline"),
        (P2PBatch((Transfer("Recv", "value", 0, 0, 1),)), "names the wrong rank"),
        (Compute("Fwd", 9, 0), "is outside"),
        (Compute("Wgt", 0, 0), "comes before Inp"),
        (Compute("Bwd", 0, 0), "comes before Fwd"),
    ],
)
def test_an_action_that_cannot_be(wrong: Compute | P2PBatch, words: str) -> None:
    case: Case = ("1f1b", 2, 1, 2)
    lists = sound(case)
    assert words in fault([lists[0], [wrong, *lists[1]]], case)


def test_a_list_a_rank() -> None:
    case: Case = ("1f1b", 2, 1, 2)
    assert "found 1 / allowed 2" in fault(sound(case)[:1], case)
