"""Collectives beside what neither makes their input nor reads their result, where their site says so (`overlaps`).

    norm · router · start gather · finish · permute   ->   norm · start gather · router · finish · permute

A start moves up to behind what makes its input, a finish down to before what reads the result. Starts of an axis stay
in their order, which is that of their stream. All stays within its list and its layer: layers are priced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penteract.ops.declarations import OPS
from penteract.ops.tape import Call


def overlap(calls: Iterable[Call]) -> list[Call]:
    """The same calls; collectives that overlap begin as soon, and are waited for as late, as they can be."""
    given = list(calls)
    if not any(map(_overlaps, given)):
        return given
    begun = list[Call]()
    for call in given:
        moves = _overlaps(call) and call.phase == "start"
        begun.insert(_behind(begun, _keeps_behind, call) if moves else len(begun), call)
    ended = list[Call]()  # from the last to the first
    for call in reversed(begun):
        moves = _overlaps(call) and call.phase == "finish"
        ended.insert(_behind(ended, _needs, call) if moves else len(ended), call)
    return ended[::-1]


def _overlaps(call: Call) -> bool:
    return bool(call.site.attrs.get("overlaps"))


def _behind(calls: list[Call], stops: Callable[[Call, Call], bool], moved: Call) -> int:
    """The place behind the last of these calls that stops what is moved."""
    return next((at for at in range(len(calls), 0, -1) if stops(calls[at - 1], moved)), 0)


def _keeps_behind(other: Call, start: Call) -> bool:
    same_stream = other.phase == "start" and other.site.attrs.get("axis") == start.site.attrs["axis"]
    makes = any(r in start.ins for r in (*other.outs, *_written_into(other)))
    # What a finished collective leaves is there only then.
    makes |= other.phase == "finish" and other.ins[-1] in start.ins
    return same_stream or makes or other.site.layer != start.site.layer


def _needs(other: Call, finish: Call) -> bool:
    x, y = finish.ins
    reads = y in other.ins or x in _written_into(other)
    return reads or other.site.layer != finish.site.layer


def _written_into(call: Call) -> tuple[int, ...]:
    """The registers of others that a call writes: rows of results that an earlier one began, and what it overwrites."""
    filled = call.ins[len(call.ins) - call.fills :]
    if call.phase != "forward" or call.site.op_name not in OPS:
        return filled
    return (*filled, *[call.ins[i] for i in OPS[call.site.op_name].declaration.overwrites])
