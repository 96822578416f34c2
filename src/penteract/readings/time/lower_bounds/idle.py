"""An action of a layer simulated from an idle state: nothing in flight, no bucket events, a host far ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.readings.time.clock import FIRST, LONG, MILLION, PS, RUN, START, WAIT, Key, Op, simulate
from penteract.readings.time.ops import AXES, ActionOps
from penteract.units import Seconds


class Idle(NamedTuple):
    """An action simulated from an idle state: its seconds, and those of the host. Among its seconds, `waits`: for
    collectives beside which nothing is computed; `lost`: the least that it computes longer beside others of its own;
    `slack`: other waits, and what else is lost. More or slower work shortens only the last.
    `early`: those that may come before a message from another stage, if this layer is the first to read it."""

    seconds: Seconds
    waits: Seconds
    lost: Seconds
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
    `slower`: millionths by which it computes more slowly beside its own collectives."""
    calls = [op for some in ops.own for op in some]
    free, none = [0] * (FIRST + len(AXES)), [0] * len(calls)
    played = simulate(calls, free, {}, -LONG, none, slower, (0,) * len(free))
    worked = sum([op[1] for op in calls if op[0] == RUN])
    waits = _at_once(calls)
    # While a stream is busy, either compute is slower or it waits: the less it waits, the more it loses.
    lost = max(0, _busy(calls) - waits) * slower // (MILLION + slower) if slower else 0
    slack = max(0, played.done - worked - waits - lost)
    late = sum([op[1] for some in ops.own[reads:] for op in some if op[0] == RUN]) if reads > 0 else played.done
    early = (played.done - late) / PS
    host = sum([launched(op[-1]) for op in calls])
    return Idle(played.done / PS, waits / PS, lost / PS, slack / PS, host / PS, early)


def _busy(calls: Sequence[Op]) -> int:
    """The picoseconds of collectives on the busiest stream, of those that are waited for within the calls."""
    waited, busy = {op[1] for op in calls if op[0] == WAIT}, defaultdict[int, int](int)
    for op in calls:
        if op[0] == START and op[1] >= FIRST and op[3] in waited:
            busy[op[1]] += op[2]
    return max(busy.values(), default=0)


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
