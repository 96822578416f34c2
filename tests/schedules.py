"""Schedules that no layout can name but in tests: what a new one takes, and that nothing else has to know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from layouts import Case, Verdict, run_case
from penteract.engine.comm.groups import ProcessGroups
from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.generators.gpipe import ALL_FORWARD
from penteract.schedule.generators.interleaved import INTERLEAVED
from penteract.schedule.registry import SCHEDULES
from penteract.schedule.schedule import Placement, Schedule


def _deep(pp: int, vpp: int, micro_batches: int) -> list[ComputeList]:
    """1F1B whose ranks run twice as far ahead, so that a late value finds the next ranks with something to do."""
    out = list[ComputeList]()
    for rank in range(pp):
        ahead = min(2 * (pp - rank - 1), micro_batches)
        own: ComputeList = [Compute("Fwd", m) for m in range(ahead)]
        for m in range(micro_batches):
            own += [Compute("Fwd", m + ahead)] * (m + ahead < micro_batches)
            own.append(Compute("Bwd", m))
        out.append(own)
    return out


@cache
def v_shaped(pp: int, vpp: int) -> Placement:
    """Down the ranks and up again: the last rank has two stages in a row, and the first one both ends."""
    there = [*range(pp), *reversed(range(pp))] * vpp
    return Placement(tuple(tuple(s for s in range(pp * vpp) if there[s] == rank) for rank in range(pp)))


@cache
def backwards(pp: int, vpp: int) -> Placement:
    """Round robin from the last rank to the first."""
    return Placement(tuple(tuple(range(pp - 1 - rank, pp * vpp, pp)) for rank in range(pp)))


DEEP = Schedule(name="1f1b_deep", compute=_deep, steady_after=lambda pp, vpp: 2 * pp)
V_SHAPED = replace(ALL_FORWARD, name="gpipe_v", placement=v_shaped, min_pp=2, min_vpp=2)
BACKWARDS = replace(
    INTERLEAVED, name="interleaved_backwards", placement=backwards,
    compute=lambda pp, vpp, micro_batches: INTERLEAVED.compute(pp, vpp, micro_batches)[::-1],
)  # fmt: skip
NEW = (DEEP, V_SHAPED, BACKWARDS)


@contextmanager
def registered() -> Iterator[None]:
    """With these in the registry."""
    SCHEDULES.update({s.name: s for s in NEW})
    try:
        yield
    finally:
        for s in NEW:
            del SCHEDULES[s.name]


def run_registered(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    """`run_case` on a rank of the pool, which is a process of its own."""
    with registered():
        return run_case(rank, groups, case)
