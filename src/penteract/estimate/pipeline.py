"""How long a step's passes take together: the schedule's critical path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum, isclose

from penteract.schedule.actions import computes
from penteract.schedule.in_flight import action_lists, steady
from penteract.schedule.rendezvous import Order, order
from penteract.spec.layout import Layout, Schedule
from penteract.units import Seconds

Passes = tuple[Mapping[str, Seconds], ...]  # by chunk: seconds of each action of one micro-batch


def critical_path(layout: Layout, ranks: Sequence[Passes], wire: Seconds) -> tuple[Seconds, ...]:
    """When each pipeline rank has done its last action. `wire`: seconds of a message between stages.

    Long schedules repeat themselves: once two turns of pp micro-batches take equally long, and as long on every rank,
    so do the others. Uneven stages settle late, and are played until they have.
    """
    lay, m = layout, layout.gradient_accumulation_steps
    if lay.pp == 1:
        return (m * fsum(fsum(times.values()) for times in ranks[0]),)
    enough = steady(lay.pp, lay.vpp) + lay.pp
    if m <= enough + lay.pp:
        return _ends(lay, ranks, wire, m)
    at = enough + (m - enough) % lay.pp
    while at + 2 * lay.pp < m:
        one, two, three = (_ends(lay, ranks, wire, at + n * lay.pp) for n in range(3))
        turn = [c - b for b, c in zip(two, three, strict=True)]
        even = all(isclose(t, turn[0], rel_tol=1e-9) for t in turn)  # a faster rank is held up sooner or later
        if even and all(isclose(b - a, t, rel_tol=1e-9) for a, b, t in zip(one, two, turn, strict=True)):
            turns = (m - at) // lay.pp - 2
            return tuple(c + turns * t for c, t in zip(three, turn, strict=True))
        at = min(m, 2 * at + (m - 2 * at) % lay.pp)
    return _ends(lay, ranks, wire, m)


def _ends(lay: Layout, ranks: Sequence[Passes], wire: Seconds, micros: int) -> tuple[Seconds, ...]:
    line = _line(lay.schedule, lay.pp, lay.vpp, micros)
    costs = [fsum(ranks[rank][chunk][kind] for kind, chunk in parts) for rank, parts in line.works]
    at = line.order.ends([costs[work] for work in line.work], wire)
    return tuple(at[moment] for moment in line.last)


@dataclass(frozen=True, slots=True)
class _Line:
    """A schedule in the order of its steps, with what each of them takes: `work`, a number in `works`."""

    order: Order
    works: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]  # rank, (kind, chunk) of each part
    work: tuple[int, ...]
    last: tuple[int, ...]


@cache
def _line(schedule: Schedule, pp: int, vpp: int, micros: int) -> _Line:
    line = order(action_lists(schedule, pp, vpp, micros))
    works: dict[tuple[int, tuple[tuple[str, int], ...]], int] = {}
    work = [
        works.setdefault((rank, tuple([(part.kind, part.chunk) for part in computes(action)])), len(works))
        for rank, action in line.steps
    ]
    return _Line(line, tuple(works), tuple(work), tuple(line.last()))


def least(micros: int, passes: Sequence[Passes], group: Sequence[int], wire: Seconds) -> list[tuple[Seconds, Seconds]]:
    """Lower bounds by group of ranks with the same `passes`: of when the last of them has done its own work, and of
    when the first stage has its last gradient. `group`: of each rank.

    The first micro-batch must come to a rank, all must be worked on there, and the last gradient must go back.
    """
    own = list[tuple[Seconds, Seconds, Seconds, Seconds]]()
    for chunks in passes:
        late = fsum([times.get("Wgt", 0.0) for times in chunks])  # may wait until the gradient has gone on
        work = micros * fsum([fsum(times.values()) for times in chunks])
        back = chunks[0].get("Bwd", 0.0) + chunks[0].get("Inp", 0.0)
        own.append((work, micros * late, chunks[0]["Fwd"] + wire, back + wire))
    found = [(0.0, 0.0)] * len(own)
    there = back = 0.0
    for g in group:  # of a group, the last rank is the one that is furthest
        work, late, on, off = own[g]
        found[g] = there + work, there + work - late + back
        there, back = there + on, back + off
    return found
