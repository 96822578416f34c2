"""The largest absolute values of new parameters, found by the kernel that makes them (`quantised/largest_rows.py`)."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.kernels.quantised import largest_rows
from penteract.engine.kernels.triton.bits import wide
from penteract.engine.kernels.triton.quantised.quantise import patterns_of

TILE = tl.constexpr(largest_rows.TILE)
_NONE = tl.constexpr(0x7FFFFFFF)  # no number has a larger pattern


@triton.jit
def place_of(rows, tile, COUNT: tl.constexpr):
    """-> the place of the value of the weight that a tile is of, in `COUNT` rows, and the pattern that is there now;
    one that nothing exceeds for a tile of no weight. Where it is read long before it is needed, nobody waits for it."""
    numbers = rows.to(tl.pointer_type(tl.int32), bitcast=True)
    at = tile * 0
    for i in tl.static_range(31, -1, -1):  # the last row that does not begin behind it
        if 1 << i < COUNT:
            there = at + (1 << i)
            begins = tl.load(numbers + there * 4 + 1, there < COUNT, other=_NONE)
            at = tl.where(begins <= tile, there, at)
    place = numbers + at * 4
    inside = (tl.load(place + 1) <= tile) & (tile < tl.load(place + 2))
    return place, tl.load(place, inside, other=_NONE)


@triton.jit
def put_largest(place, before, kept, here):
    """Put the larger of what is at a place and of |kept| where `here` is true there. `before`: the pattern that was
    there when this program began: most find nothing larger, and need no atomic operation."""
    found = tl.max(tl.where(here, patterns_of(wide(kept)), 0))
    if found > before:
        tl.atomic_max(place, found)
