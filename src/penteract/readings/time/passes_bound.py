"""A lower bound of the step time: all pipeline ranks, each of whose actions takes the seconds of its pass from an idle
state. It has the waits of the schedule and of its messages, but knows no buckets and no collectives in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penteract.readings.time.clock import ps
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import Derived
from penteract.readings.time.numbered_schedule import NumberedSchedule
from penteract.readings.time.rank_clock import RankClock, StreamState
from penteract.readings.time.ranks import Ranks
from penteract.units import Seconds

_IDLE = StreamState((0,), (), 0, fixed=True)


@dataclass(slots=True)
class PassClock:
    """A clock whose actions are numbers of `took`: picoseconds, and those of them that may come before a message.
    `arrives`: when the message of the next action does."""

    took: list[tuple[int, int]]
    arrives: int = 0

    def rank_clock(self) -> RankClock:
        """An idle rank clock."""
        return RankClock(_IDLE)

    def take(self, m: RankClock, action: int) -> None:
        """An action, which reads the message that was expected, if one was."""
        took, early = self.took[action]
        m.now = max(m.now + took, self.arrives + took - early)
        self.arrives = 0

    def expect(self, m: RankClock, moment: int) -> None:
        """The next action reads a message that arrives at a future `moment`."""
        self.arrives = moment

    def wait_until(self, m: RankClock, moment: int, _: str) -> None:
        """Wait for messages that were sent."""
        m.now = max(m.now, moment)


@dataclass(frozen=True, slots=True)
class PassProgram:
    """What `Ranks` needs of the program of a rank: its clock."""

    clock: PassClock


def ranks_of_passes(
    line: NumberedSchedule, passes: Sequence[Sequence[Mapping[str, Seconds]]],
    early: Sequence[Sequence[Mapping[str, Seconds]]], wires: Sequence[int], skipped: int,
) -> Ranks:  # fmt: skip
    """The ranks before their first step. `passes`: the seconds of each action, by pipeline rank and chunk; `early`:
    those of them that may come before a message."""
    numbers, derived = {(0, 0): 0}, list[Derived]()
    for own, ahead, computes in zip(passes, early, line.computes, strict=True):
        number = {
            (kind, c): numbers.setdefault((ps(seconds), ps(ahead[c].get(kind, 0.0))), len(numbers))
            for c, chunk in enumerate(own) for kind, seconds in chunk.items()
        }  # fmt: skip
        actions = [number.get((a.kind, a.chunk), 0) for a in computes]
        derived.append(Derived(0, actions, [0] * len(actions), 0, ()))
    programs = cast(Sequence[ClockProgram], [PassProgram(PassClock([*numbers]))] * len(passes))
    return Ranks(line, programs, derived, wires, 0, skipped)
