"""Proof that a schedule is complete, in order and free of deadlock; and its cost in time and memory.

It is independent of `transfers`, whose results it checks: it reads only the finished lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from penteract.errors import Bug
from penteract.schedule.actions import ActionList, P2PBatch, computes
from penteract.schedule.rendezvous import ActionSpan, Cost, order, rendezvous, unit_cost
from penteract.schedule.schedule import Placement
from penteract.schedule.schedule_state import Message, ScheduleState, message_of


@dataclass(frozen=True, slots=True)
class Report:
    """The cost of a correct schedule. Tuples are by pipeline rank.

    in_flight_peak  activations of (chunk, micro) alive at once, from Fwd until Bwd or Wgt
    received_peak   received values and gradients that wait for their consumer at once
    makespan        from the first start to the last end, in the unit of the given cost
    bubble          the fraction of pp·makespan in which ranks do not compute
    spans           when every action ran
    """

    in_flight_peak: tuple[int, ...]
    received_peak: tuple[int, ...]
    makespan: float
    bubble: float
    spans: tuple[tuple[ActionSpan, ...], ...]


def check(
    action_lists: Sequence[ActionList], placement: Placement, num_micro_batches: int, *, cost: Cost = unit_cost,
    wire: float = 0.0,
) -> Report:  # fmt: skip
    """Walk the lists with unbuffered sends: a message moves when both its ranks have posted it.

    Transfers that are posted together must also work one by one, in the order in which they are listed: on a GPU each
    is a kernel on a connection of its two ranks, and kernels of one connection, or of connections that share a device
    queue, run in the order in which they were posted.

    `cost(rank, compute)` is the time of one walk, `wire` that of one message. By default Fwd, Inp and Wgt take 1,
    Bwd takes 2, and a message nothing.

    Raises Bug("SCHEDULE") with the first fault: an action that is missing, repeated, or before what it needs; two ranks
    that list their messages in different orders; a cycle of ranks that wait for each other.
    """
    pp = placement.pp
    if len(action_lists) != pp:
        raise Bug("SCHEDULE", "a schedule has one list a rank", found=len(action_lists), allowed=pp)
    programs = [ScheduleState(rank, placement, num_micro_batches) for rank in range(pp)]
    for program, actions in zip(programs, action_lists, strict=True):
        for action in actions:
            program.step(action)
        program.finish()
    _same_order(action_lists, placement)
    order([_one_by_one(actions) for actions in action_lists], placement)
    spans = rendezvous(action_lists, placement, cost, wire)
    makespan = max(row[-1].end for row in spans)
    busy = sum(cost(rank, part) for rank, row in enumerate(spans) for span in row for part in computes(span.action))
    return Report(
        in_flight_peak=tuple(program.kept_peak for program in programs),
        received_peak=tuple(program.received_peak for program in programs),
        makespan=makespan,
        bubble=1 - busy / (pp * makespan),
        spans=tuple(tuple(row) for row in spans),
    )


def _one_by_one(actions: ActionList) -> ActionList:
    """Each transfer in a P2P batch of its own, so that it must finish before the next is posted: the strictest
    waits."""
    return [one for a in actions for one in ([P2PBatch((t,)) for t in a.transfers] if isinstance(a, P2PBatch) else [a])]


def _same_order(lists: Sequence[ActionList], placement: Placement) -> None:
    """Two ranks must list the messages between them in the same order, as messages are matched only by order. Values
    and gradients have separate connections; a common order of all messages is a common order of each kind."""
    between: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, actions in enumerate(lists):
        for action in actions:
            for t in action.transfers if isinstance(action, P2PBatch) else ():
                between[rank, t.peer].append(message_of(t, rank, placement))
    for low, high in combinations(range(len(lists)), 2):
        for a, b in zip_longest(between[low, high], between[high, low]):
            if a != b:
                found = f"{a or 'nothing'} on rank {low}, {b or 'nothing'} on rank {high}"
                raise Bug("SCHEDULE", f"ranks {low} and {high} differ in the order of their messages", found=found)
