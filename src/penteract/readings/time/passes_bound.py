"""A lower bound of the step time: all pipeline ranks, each of whose actions takes the seconds of its pass from an idle
state. It has the waits of the schedule and of its messages, but knows no buckets and no collectives in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from penteract.readings.time.clock import ps
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import Derived
from penteract.readings.time.numbered_schedule import NumberedSchedule
from penteract.readings.time.rank_clock import RankClock, StreamState
from penteract.readings.time.ranks import Ranks
from penteract.units import Seconds

_IDLE = StreamState((0,), (), 0, fixed=True)


class PassClock:
    """A clock whose actions are named by their picoseconds."""

    def rank_clock(self) -> RankClock:
        """An idle rank clock."""
        return RankClock(_IDLE)

    def take(self, m: RankClock, action: int) -> None:
        """An action of so many picoseconds."""
        m.now += action

    def expect(self, m: RankClock, moment: int) -> None:
        """The next action reads a message that arrives at a future `moment`, before anything else."""
        m.now = moment

    def wait_until(self, m: RankClock, moment: int, _: str) -> None:
        """Wait for messages that were sent."""
        m.now = max(m.now, moment)


class PassProgram:
    """What `Ranks` needs of the program of a rank: its clock."""

    clock = PassClock()


def ranks_of_passes(
    line: NumberedSchedule, passes: Sequence[Sequence[Mapping[str, Seconds]]], wires: Sequence[int], skipped: int
) -> Ranks:
    """The ranks before their first step. `passes`: the seconds of each action, by pipeline rank and chunk."""
    programs, derived = cast(Sequence[ClockProgram], [PassProgram()] * len(passes)), list[Derived]()
    for own, computes in zip(passes, line.computes, strict=True):
        took = {(kind, c): ps(seconds) for c, chunk in enumerate(own) for kind, seconds in chunk.items()}
        actions = [took.get((a.kind, a.chunk), 0) for a in computes]
        derived.append(Derived(0, actions, [0] * len(actions), 0, ()))
    return Ranks(line, programs, derived, wires, 0, skipped)
