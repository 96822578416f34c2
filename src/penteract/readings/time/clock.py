"""The clock: `play` is the one place where time advances. All else says what is played, and when it need not be.

A rank has streams: compute (`now`), the host that launches, one for each process group as `Comm` makes them, a side
stream whose waits hold no computation up, and copies to and from the host. What starts waits for what was computed so
far and for its stream; what waits is not slowed otherwise. Times are integer picoseconds and a state is relative to
`now`, so a state that comes again is the same state, and a jump over repeats is exact.

op       (RUN, took, part, name) | (START, stream, took, key, name) | (WAIT, key, part, name) | (LOOK, name)
         | (BESIDE, waited, before, stream, took, key, name): on the side stream, `before` is computed there first
segment  what one unit (embedding, a layer, the head) does in one action, with the bucket events around its calls
key      (op, unit, number) of what is under way. Those of "g" gathers, "r" sums, "c" copies and "u" gathers after
         the update count units from the segment's own, so that equal layers are one segment
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penteract.readings.ideal import PARTS

RUN, START, WAIT, LOOK, BESIDE = range(5)
SIDE, OUT, IN, FIRST = range(4)  # streams: of waits, copies to the host and from it; from FIRST on, process groups
PS, MILLION = 10**12, 10**6
LONG, FAR = 10**18, 10**19  # beyond any moment of a step, and beyond any sum of those
PART = {name: i for i, name in enumerate(PARTS)}
LAUNCH = PART["launch"]

Key = tuple[str, int, int]
Op = tuple[Any, ...]
Flights = tuple[tuple[Key, int], ...]  # what is under way, and when it is done
Log = Callable[[int, str, int, int], None]  # stream, name, start, end
Parts = tuple[int, ...]

COMPUTE, HOST = -1, -2  # in a log, beside the streams
RELATIVE = frozenset("grcu")


def ps(seconds: float) -> int:
    """Picoseconds."""
    return round(seconds * PS)


@dataclass(slots=True)
class PlayedSegment:
    """What playing ops gave, relative to their beginning.

    done      when compute is
    flights   what was started and is not waited for
    host      when the host has launched all
    latest    the latest host for which this is so; it matters no more once the host has waited for the device
    floor     the earliest that the host can be done, as it waited for the device; beyond all where it did not
    """

    done: int
    flights: dict[Key, int]
    host: int
    latest: int
    floor: int
    parts: list[int]


def play(  # noqa: C901, PLR0913 (each kind of op in turn, without a call: a search plays millions)
    ops: Sequence[Op], free: list[int], flights: dict[Key, int], host: int, launches: Sequence[int], slower: int,
    owner: Sequence[int], log: Log | None = None,
) -> PlayedSegment:  # fmt: skip
    """Play `ops` from 0. `free`: when each stream is; changed, as `flights` is.

    launches  picoseconds that the host needs for each op
    slower    millionths by which compute is slower while a process group's stream is busy; it counts as busy from when
              a collective is posted, so that later states never end sooner
    owner     of each stream, the part of a step that waiting for it is
    """
    now, slack, floor, looked = 0, FAR, -FAR, False
    parts = [0] * len(PARTS)
    busy, by = 0, 0
    for s in range(FIRST, len(free)):
        if free[s] > busy:
            busy, by = free[s], s
    for op, launch in zip(ops, launches, strict=True):
        if log:
            log(HOST, op[-1], host, host + launch)
        host += launch
        floor += launch
        kind = op[0]
        if kind == RUN:
            took: int = op[1]
            start = now
            if host > now:
                start = host
                parts[LAUNCH] += host - now
            if not looked and now - host < slack:
                slack = now - host
            if busy > start:
                more = (took if took < busy - start else busy - start) * slower // MILLION
                parts[owner[by]] += more
                now = start + took + more
            else:
                now = start + took
            parts[op[2]] += took
            if log:
                log(COMPUTE, op[3], start, now)
        elif kind == WAIT:
            until: int = flights.pop(op[1], 0)  # what has landed is left out of states
            if until > now:
                parts[op[2]] += until - now
                if log:
                    log(COMPUTE, op[3], now, until)
                now = until
        elif kind == LOOK:
            if not looked and now - host < slack:
                slack = now - host
            host = host if host > now else now
            floor, looked = host, True
        else:
            begun, stream, key = now, int(op[-4]), op[-2]
            took = op[-3]
            if kind == BESIDE:  # it waits on the side stream, and no computation waits with it
                begun = free[SIDE] = max(free[SIDE], now, host, flights.pop(op[1], 0)) + int(op[2])
            ready = begun if begun > free[stream] else free[stream]
            if not looked and ready - host < slack:
                slack = ready - host
            start = ready if ready > host else host
            free[stream] = end = start + took
            if stream >= FIRST and end > busy:
                busy, by = end, stream
            if key is not None:
                flights[key] = end
            if log:
                log(stream, op[-1], start, end)
    return PlayedSegment(now, flights, host, slack, floor, parts)
