"""How often a step all-gathers the units of one pipeline rank, counted from its schedule and its ring of buffers."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

from penteract.schedule.actions import Compute
from penteract.schedule.in_flight import compute_lists
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.step.ring_buffer import DEPTH
from penteract.step.unit_gathers import gathers


class RankOf(NamedTuple):
    """A pipeline rank whose units are gathered.

    chunks  (number of a unit, how many in a row), of each chunk
    read    the actions that read the units of each number
    keeps   whether it keeps gathered parameters until the end of a step
    """

    schedule: ScheduleName
    pp: int
    vpp: int
    rank: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    read: tuple[frozenset[str], ...]
    keeps: bool


@cache
def gathered(rank: RankOf, num_micro_batches: int) -> tuple[int, ...]:
    """How often a step gathers units of each number: each once, where the rank keeps them. A long schedule is periodic,
    so it is extrapolated from two shorter ones."""
    if rank.keeps:
        units = Counter[int]()
        for number, n in chain.from_iterable(rank.chunks):
            units[number] += n
        return tuple([units[number] if read else 0 for number, read in enumerate(rank.read)])
    schedule = schedule_of(rank.schedule)
    enough, period = 2 * schedule.steady_after(rank.pp, rank.vpp), 2 * schedule.period(rank.pp, rank.vpp)
    if num_micro_batches <= enough + 2 * period:
        return count_gathers(rank, num_micro_batches)
    first = enough + (num_micro_batches - enough) % period
    few, more = count_gathers(rank, first), count_gathers(rank, first + period)
    return tuple([a + (b - a) * ((num_micro_batches - first) // period) for a, b in zip(few, more, strict=True)])


@cache
def count_gathers(rank: RankOf, num_micro_batches: int) -> tuple[int, ...]:
    """The same, counted action by action."""
    row = [[number for number, n in chunk for _ in range(n)] for chunk in rank.chunks]
    begins = list(accumulate(map(len, row), initial=0))
    turns: dict[tuple[str, int], tuple[int, ...]] = {}
    for c, (numbers, begin) in enumerate(zip(row, begins, strict=False)):
        for action in {action for number in numbers for action in rank.read[number]}:
            units = [begin + k for k, number in enumerate(numbers) if action in rank.read[number]]
            turns[action, c] = tuple(units if action == "Fwd" else reversed(units))
    actions = compute_lists(rank.schedule, rank.pp, rank.vpp, num_micro_batches)[rank.rank]
    own = [turns.get((a.kind, a.chunk), ()) for a in actions if isinstance(a, Compute)]
    found, out = gathers(own, DEPTH), [0] * len(rank.read)
    for unit, number in enumerate([number for own in row for number in own]):
        out[number] += found[unit]
    return tuple(out)
