"""How many micro-batches are between two points of their pass at once; this decides how many buffers a rank needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count

from penteract.schedule.actions import ActionList, ComputeList, P2PBatch, computes
from penteract.schedule.registry import ScheduleName, generate, schedule_of
from penteract.schedule.transfers import with_transfers

Span = tuple[str, str]  # from one moment to another: an action, or a transfer such as "Recv value"
_MOMENTS = {(way, what): f"{way} {what}" for way in ("Send", "Recv") for what in ("value", "gradient")}
_MESSAGES = frozenset(_MOMENTS.values())
_Times = Mapping[tuple[str, int], list[int]]  # (moment, chunk) -> its times, one for each micro-batch


@cache
def action_lists(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> Sequence[ActionList]:
    """The actions of each pipeline rank in a step."""
    return with_transfers(compute_lists(schedule, pp, vpp, num_micro_batches), schedule_of(schedule).placement(pp, vpp))


@cache
def compute_lists(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> Sequence[ComputeList]:
    """The same, without messages."""
    return generate(schedule, pp, vpp, num_micro_batches)


@cache
def most_in_flight(
    schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, members: tuple[tuple[int, Span], ...]
) -> tuple[int, ...]:
    """For each pipeline rank, the most micro-batches at once within `members`, the (chunk, span) pairs that share one
    pool of buffers; 0 if a rank has no such moment.

    A long schedule repeats itself: beyond `steady_after` micro-batches it holds no more. If all forwards come first, it
    holds one more for each further micro-batch.
    """
    enough = schedule_of(schedule).steady_after(pp, vpp)
    if num_micro_batches <= enough:
        return _most(schedule, pp, vpp, num_micro_batches, members)
    held = _most(schedule, pp, vpp, enough, members)
    if schedule_of(schedule).alternates:
        return held
    more = _most(schedule, pp, vpp, enough + 1, members)
    return tuple(a + (b - a) * (num_micro_batches - enough) for a, b in zip(held, more, strict=True))


@cache
def _most(
    schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, members: tuple[tuple[int, Span], ...]
) -> tuple[int, ...]:
    # Messages between actions do not change the order of these: they are left out where no span needs them.
    messages = any(moment in _MESSAGES for _, span in members for moment in span)
    return tuple(_most_of(_times(schedule, pp, vpp, num_micro_batches, rank, messages), members) for rank in range(pp))


def _most_of(times: _Times, members: tuple[tuple[int, Span], ...]) -> int:
    begins: list[int] = []
    ends: list[int] = []
    for chunk, (begin, end) in members:
        late = not end.startswith("Send")  # what is sent is freed before anything else happens
        begins += times.get((begin, chunk), ())
        ends += [t + late for t in times.get((end, chunk), ())]
    if len(begins) != len(ends):
        return 0
    begins.sort()
    ends.sort()
    most = gone = 0
    for inside, begin in enumerate(begins, 1):
        while ends[gone] <= begin:
            gone += 1
        if inside - gone > most:
            most = inside - gone
    return most


@cache
def _times(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, rank: int, messages: bool) -> _Times:
    """The times of all moments of all passes, on one rank; without `messages` only those of computations.

    An action takes three ticks: earlier sends are freed, new registers are born, others die.
    """
    when = defaultdict[tuple[str, int], list[int]](list)
    sent: list[tuple[str, int]] = []
    lists = action_lists if messages else compute_lists
    actions = lists(schedule, pp, vpp, num_micro_batches)[rank]
    for tick, action in zip(count(step=3), actions):
        if not isinstance(action, P2PBatch):
            for kind, _, chunk in computes(action):
                when[kind, chunk].append(tick + 1)
            continue
        for name in sent:
            when[name].append(tick)
        sent = []
        for way, what, _, chunk, _ in action.transfers:
            name = (_MOMENTS[way, what], chunk)
            if way == "Send":
                sent.append(name)
            else:
                when[name].append(tick + 1)
    for name in sent:
        when[name].append(3 * len(actions))
    return when
