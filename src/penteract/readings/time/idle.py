"""An action of a layer simulated from an idle state: nothing in flight, no bucket events, a host far ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.readings.time.clock import FIRST, LONG, PS, RUN, START, WAIT, Key, Op, simulate
from penteract.readings.time.ops import AXES, ActionOps
from penteract.units import Seconds


class Idle(NamedTuple):
    """An action simulated from an idle state: its seconds, and those of the host. Among its seconds, `waits`: for
    collectives beside which nothing is computed; `slack`: other waits. More or slower work shortens only the latter.
    `early`: those that may come before a message from another stage, if this layer is the first to read it."""

    seconds: Seconds
    waits: Seconds
    slack: Seconds
    host: Seconds
    early: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class IdleLayer:
    """The actions of a layer, each from an idle state. Caches use it as their key."""

    actions: Mapping[str, Idle]


def from_idle(ops: ActionOps, launched: Callable[[str], int], reads: int, slower: int) -> Idle:
    """An action simulated with nothing in flight and the host far ahead. Copies that run during neighbours are not
    counted. `reads`: the call that is the first to read what another stage sends; recomputation comes before it.
    `slower`: millionths by which it computes more slowly beside its own collectives: these are in its slack."""
    calls = [op for some in ops.own for op in some]
    free, none = [0] * (FIRST + len(AXES)), [0] * len(calls)
    played = simulate(calls, free, {}, -LONG, none, slower, (0,) * len(free))
    worked = sum([op[1] for op in calls if op[0] == RUN])
    waits = _at_once(calls)
    slack = played.done - worked - waits
    late = sum([op[1] for some in ops.own[reads:] for op in some if op[0] == RUN]) if reads > 0 else played.done
    early = (played.done - late) / PS
    return Idle(played.done / PS, waits / PS, slack / PS, sum([launched(op[-1]) for op in calls]) / PS, early)


def _at_once(calls: Sequence[Op]) -> int:
    """The least picoseconds of waits: those within calls without computation between them, with all streams free."""
    total = now = 0
    free, ends = defaultdict[int, int](int), dict[Key, int]()
    for op in calls:
        if op[0] == START:
            free[op[1]] = ends[op[3]] = max(now, free[op[1]]) + op[2]
        elif op[0] == WAIT:
            now = max(now, ends.get(op[1], 0))
        elif ends:
            total, now = total + now, 0
            free.clear()
            ends.clear()
    return total + now
