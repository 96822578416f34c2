"""A rank that is played without its peers: a bound that sees what its own streams make it wait for.

The rank begins with nothing under way when all know the gradient's norm, and its first micro-batch is there as early as
it can be. All later messages are there at once. In any step its state is later, as the clock is monotone.
"""

from __future__ import annotations

from collections.abc import Sequence

from penteract.readings.time.clock import LONG
from penteract.readings.time.derive import Derived
from penteract.readings.time.rank_clock import RankClock
from penteract.readings.time.stage import Stage
from penteract.step import names


def alone(stage: Stage, derived: Derived, turns: Sequence[int], skipped: int, arrives: int, back: int) -> int:
    """Picoseconds from one norm to the next, at least.

    turns    the actions before which turns of micro-batches begin; `skipped`: how many `derived` leaves out
    arrives  when its first micro-batch is there; `back`: what others need once its last action is done
    """
    clock, m = stage.clock, stage.clock.machine()
    m.host = -LONG  # it has launched all of this long ago
    for segment, unit, needs in derived.update:
        clock.advance(m, segment, unit, needs)
    m.host = max(m.host, m.now)  # it looks at the losses
    clock.take(m, derived.opening)
    clock.wait_until(m, arrives, names.WAIT_STAGE)
    at, left, seen = 0, skipped, dict[object, tuple[int, RankClock]]()
    for k, begin in enumerate(turns if skipped else ()):
        for action in derived.actions[at:begin]:
            clock.take(m, action)
        at, key = begin, (m.state.number, 0 if m.state.fixed else m.unit, len(m.pending), derived.left[begin])
        now = RankClock(m.state, m.now, m.host, held=m.held)
        before, then = seen.setdefault(key, (k, now))
        # From the same state with a host no earlier, or one that holds nothing up, each turn takes as long or longer.
        # The host is left where it was: earlier is a bound, too.
        if before < k and (m.held == then.held or m.host - m.now >= then.host - then.now):
            m.now += (m.now - then.now) * left // (k - before)
            break
    for action in derived.actions[at:]:
        clock.take(m, action)
    done = m.now
    clock.take(m, derived.closing)
    return max(m.now, done + back)
