"""Sizes for which a schedule exists, drawn as such: most of all sizes are not, and none is drawn in vain."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from penteract.schedule.registry import ScheduleName, breach, schedule_of

Sizes = tuple[ScheduleName, int, int, int]  # of pipeline ranks, chunks of a rank, micro-batches


@st.composite
def legal_sizes(draw: st.DrawFn, names: Sequence[ScheduleName], pp: int = 8, vpp: int = 4, micros: int = 16) -> Sizes:
    """One of the schedules, with at most so many pipeline ranks, chunks of a rank and micro-batches."""
    schedule = schedule_of(draw(st.sampled_from(names)))
    ranks = draw(st.integers(schedule.min_pp, int(min(pp, schedule.max_pp))))
    chunks = draw(st.integers(schedule.min_vpp, int(min(vpp, schedule.max_vpp)))) if ranks > 1 else 1
    rounds = draw(st.integers(1, micros // schedule.round(ranks)))
    drawn = (schedule.name, ranks, chunks, rounds * schedule.round(ranks))
    assert breach(*drawn) is None
    return drawn
