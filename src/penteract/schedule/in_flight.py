"""How many micro-batches are between two moments of their way at once: what decides how many buffers a rank needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count

from penteract.schedule.actions import ActionList, ComputeList, Exchange, computes
from penteract.schedule.registry import ScheduleName, generate, schedule_of
from penteract.schedule.transfers import with_transfers

Span = tuple[str, str]  # from a moment to a moment: an action, or the "Recv value" or "Send gradient" of a border
_MOMENTS = {(way, what): f"{way} {what}" for way in ("Send", "Recv") for what in ("value", "gradient")}
_Times = Mapping[tuple[str, int], list[int]]  # (moment, chunk) -> when, for one micro-batch after the other


@cache
def action_lists(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> Sequence[ActionList]:
    """What each pipeline rank does in a step."""
    return with_transfers(compute_lists(schedule, pp, vpp, micros), schedule_of(schedule).placement(pp, vpp))


@cache
def compute_lists(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> Sequence[ComputeList]:
    """The same, without messages."""
    return generate(schedule, pp, vpp, micros)


@cache
def most_in_flight(
    schedule: ScheduleName, pp: int, vpp: int, micros: int, members: tuple[tuple[int, Span], ...]
) -> tuple[int, ...]:
    """The most micro-batches at once, on each pipeline rank, inside of any of `members`, (chunk, span), that share one
    pool of buffers; zero where a rank has no such moment.

    A long schedule repeats itself: beyond `steady_after` micro-batches it holds no more, or, where nothing goes back
    before all have gone forward, one more for each.
    """
    enough = schedule_of(schedule).steady_after(pp, vpp)
    if micros <= enough:
        return _most(schedule, pp, vpp, micros, members)
    held = _most(schedule, pp, vpp, enough, members)
    if schedule_of(schedule).alternates:
        return held
    more = _most(schedule, pp, vpp, enough + 1, members)
    return tuple(a + (b - a) * (micros - enough) for a, b in zip(held, more, strict=True))


@cache
def _most(
    schedule: ScheduleName, pp: int, vpp: int, micros: int, members: tuple[tuple[int, Span], ...]
) -> tuple[int, ...]:
    return tuple(_most_of(_times(schedule, pp, vpp, micros, rank), members) for rank in range(pp))


def _most_of(times: _Times, members: tuple[tuple[int, Span], ...]) -> int:
    begins, ends = list[int](), list[int]()
    for chunk, (begin, end) in members:
        late = not end.startswith("Send")  # what is sent is let go of before anything else happens
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
        most = max(most, inside - gone)
    return most


@cache
def _times(schedule: ScheduleName, pp: int, vpp: int, micros: int, rank: int) -> _Times:
    """When each moment of each pass is, on one rank.

    An action takes three ticks: what was sent before is let go of, something is born, something dies.
    """
    when = defaultdict[tuple[str, int], list[int]](list)
    sent: list[tuple[str, int]] = []
    actions = action_lists(schedule, pp, vpp, micros)[rank]
    for tick, action in zip(count(step=3), actions):
        if not isinstance(action, Exchange):
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
