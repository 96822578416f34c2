"""How long a step's passes take together: the schedule's critical path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from penteract.schedule.actions import Compute
from penteract.schedule.in_flight import action_lists, steady
from penteract.schedule.rendezvous import rendezvous
from penteract.spec.layout import Layout
from penteract.units import Seconds

Passes = tuple[Mapping[str, Seconds], ...]  # by chunk: seconds of each action of one micro-batch


def critical_path(layout: Layout, ranks: Sequence[Passes], wire: Seconds) -> tuple[Seconds, ...]:
    """When each pipeline rank has done its last action. `wire`: seconds of a message between stages.

    Long schedules repeat themselves, so beyond `steady` micro-batches each turn takes as long as the last two told.
    """
    lay, m = layout, layout.gradient_accumulation_steps
    if lay.pp == 1:
        return (m * fsum(fsum(times.values()) for times in ranks[0]),)
    enough = steady(lay.pp, lay.vpp) + lay.pp
    if m <= enough + lay.pp:
        return _ends(lay, ranks, wire, m)
    first = enough + (m - enough) % lay.pp
    few, more = (_ends(lay, ranks, wire, n) for n in (first, first + lay.pp))
    turns = (m - first) // lay.pp
    return tuple(a + turns * (b - a) for a, b in zip(few, more, strict=True))


def _ends(lay: Layout, ranks: Sequence[Passes], wire: Seconds, micros: int) -> tuple[Seconds, ...]:
    def cost(rank: int, compute: Compute) -> Seconds:
        return ranks[rank][compute.chunk][compute.kind]

    spans = rendezvous(action_lists(lay.schedule, lay.pp, lay.vpp, micros), cost, wire)
    return tuple(done[-1].end for done in spans)


def least(layout: Layout, ranks: Sequence[Passes], wire: Seconds) -> tuple[tuple[Seconds, Seconds], ...]:
    """Lower bounds by rank: of when it has done its own work, and of when the first stage has its last gradient.

    The first micro-batch must come to it, all must be worked on there, and the last gradient must go back.
    """
    m, out = layout.gradient_accumulation_steps, list[tuple[Seconds, Seconds]]()
    there = back = 0.0
    for r, chunks in enumerate(ranks):
        work = m * fsum(fsum(times.values()) for times in chunks)
        late = m * fsum(times.get("Wgt", 0.0) for times in chunks)  # may wait until the gradient has gone on
        out.append((there + work, there + work - late + back))
        if r + 1 < len(ranks):
            there += chunks[0]["Fwd"] + wire
            back += chunks[0].get("Bwd", 0.0) + chunks[0].get("Inp", 0.0) + wire
    return tuple(out)
