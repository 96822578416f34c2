"""A lower bound of the step time: one rank simulated without its peers. It includes waits for the rank's own streams.

The rank begins with nothing in flight when all ranks know the gradient norm. Its first micro-batch arrives as early as
it can, and later messages cost no wait. The clock is monotone, so the rank is never earlier in a real step.
"""

from __future__ import annotations

from collections.abc import Sequence

from penteract.readings.time.clock import LONG
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import Derived
from penteract.readings.time.rank_clock import RankClock


def alone(program: ClockProgram, derived: Derived, turns: Sequence[int], skipped: int, arrives: int, back: int) -> int:
    """A lower bound of the picoseconds from one gradient norm to the next.

    turns    the actions before which periods of the schedule begin; `skipped`: how many periods `derived` leaves out
    arrives  when its first micro-batch arrives; `back`: what other ranks need after its last action
    """
    clock, m = program.clock, program.clock.rank_clock()
    m.host = -LONG  # the host has launched all of this long before
    for segment, unit, needs in derived.update:
        clock.advance(m, segment, unit, needs)
    clock.take(m, derived.opening)
    if arrives > m.now:  # parameters are gathered, and inputs made again, before the message is read
        clock.expect(m, arrives)
    at, left, seen = 0, skipped, dict[object, tuple[int, RankClock]]()
    for k, begin in enumerate(turns if skipped else ()):
        for action in derived.actions[at:begin]:
            clock.take(m, action)
        at, key = begin, (m.state.number, 0 if m.state.fixed else m.unit, len(m.pending), derived.left[begin])
        now = RankClock(m.state, m.now, m.host, held=m.held)
        before, then = seen.setdefault(key, (k, now))
        # From the same state, with a host that is no earlier or that delays nothing, each period takes as long or
        # longer. The host stays where it is: an earlier host gives a bound, too.
        if before < k and (m.held == then.held or m.host - m.now >= then.host - then.now):
            m.now += (m.now - then.now) * left // (k - before)
            break
    for action in derived.actions[at:]:
        clock.take(m, action)
    done = m.now
    clock.take(m, derived.closing)
    return max(m.now, done + back)
