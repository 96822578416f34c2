"""The clock: `simulate` is the only place where time advances. Other files decide which ops are simulated, and which
repeat and can be skipped.

A rank has streams: compute (`now`), the host that launches, one for each process group (as `Comm` makes them), a side
stream whose waits do not delay compute, and copies to and from the host. An op on a stream starts once all compute
before it is done and its stream is free. A wait takes no time of its own. Times are integer picoseconds, and a state is
relative to `now`: so states repeat exactly, and skipping repeats is exact.

op       (RUN, took, part, name) | (START, stream, took, key, name) | (WAIT, key, part, name) | (SYNC, name)
         | (CHAINED, waited, before, stream, took, key, name): the side stream waits for `waited` and computes for
         `before`, then the collective starts
segment  the ops of one unit (embedding, a layer, the head) in one action, with the bucket events around its calls
key      (kind, unit, number) of an op in flight. The kinds "g" (gather), "r" (reduction), "c" (copy or collective of
         the tape) and "u" (gather after the update) count units from the segment's own, so equal layers are one segment
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penteract.readings.ideal import PARTS

RUN, START, WAIT, SYNC, CHAINED = range(5)
SIDE, OUT, IN, FIRST = range(4)  # streams: side stream, copies to the host and from it; from FIRST on, process groups
PS, MILLION = 10**12, 10**6
LONG, FAR = 10**18, 10**19  # later than any moment of a step, and larger than any sum of these
PART = {name: i for i, name in enumerate(PARTS)}
LAUNCH = PART["launch"]

Key = tuple[str, int, int]
Op = tuple[Any, ...]
InFlight = tuple[tuple[Key, int], ...]  # ops in flight, and when each is done
Log = Callable[[int, str, int, int], None]  # stream, name, start, end
Parts = tuple[int, ...]

COMPUTE, HOST = -1, -2  # in a log: compute and the host, which have no stream number
RELATIVE = frozenset("grcu")


def ps(seconds: float) -> int:
    """Picoseconds."""
    return round(seconds * PS)


@dataclass(slots=True)
class SegmentResult:
    """The result of simulating ops, relative to their beginning.

    done      when compute is done
    in_flight   ops that were started and not waited for
    host      when the host has launched all
    latest    the latest host for which this result holds; no longer a limit once the host has waited for the device
    floor     the earliest that the host can be done if it waited for the device; else -FAR
    """

    done: int
    in_flight: dict[Key, int]
    host: int
    latest: int
    floor: int
    parts: list[int]


def simulate(  # noqa: C901, PLR0913 (each kind of op in turn, without a call: a search plays millions)
    ops: Sequence[Op], free: list[int], in_flight: dict[Key, int], host: int, launches: Sequence[int], slower: int,
    owner: Sequence[int], log: Log | None = None,
) -> SegmentResult:  # fmt: skip
    """Simulate `ops` from time 0. `free`: when each stream is free. `free` and `in_flight` are changed.

    launches  picoseconds that the host needs for each op
    slower    millionths by which compute is slower while a process group's stream is busy; it counts as busy from when
              a collective is posted, so that a later state never ends sooner
    owner     the part of a step to which waits for a stream belong, of each stream
    """
    now, slack, floor, synced = 0, FAR, -FAR, False
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
            if not synced and now - host < slack:
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
            until: int = in_flight.pop(op[1], 0)  # ops that are done are left out of states
            if until > now:
                parts[op[2]] += until - now
                if log:
                    log(COMPUTE, op[3], now, until)
                now = until
        elif kind == SYNC:
            if not synced and now - host < slack:
                slack = now - host
            host = host if host > now else now
            floor, synced = host, True
        else:
            begun, stream, key = now, int(op[-4]), op[-2]
            took = op[-3]
            if kind == CHAINED:  # it waits on the side stream: compute does not wait
                begun = free[SIDE] = max(free[SIDE], now, host, in_flight.pop(op[1], 0)) + int(op[2])
            ready = begun if begun > free[stream] else free[stream]
            if not synced and ready - host < slack:
                slack = ready - host
            start = ready if ready > host else host
            free[stream] = end = start + took
            if stream >= FIRST and end > busy:
                busy, by = end, stream
            if key is not None:
                in_flight[key] = end
            if log:
                log(stream, op[-1], start, end)
    return SegmentResult(now, in_flight, host, slack, floor, parts)
