"""Random bits of counters in Triton, as `engine/state/counter_random.py` mixes them."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.state import counter_random

STRIDE = tl.constexpr(counter_random.STRIDE)
(_SHIFT0, _MIX0), (_SHIFT1, _MIX1), (_SHIFT2, _) = (
    (tl.constexpr(shift), tl.constexpr(factor % 2**64)) for shift, factor in counter_random.MIXES
)


@triton.jit
def mixed(counters):
    """Random bits, uint64, of counters in int64."""
    u = counters.to(tl.uint64, bitcast=True)
    u = (u ^ (u >> _SHIFT0)) * _MIX0
    u = (u ^ (u >> _SHIFT1)) * _MIX1
    return u ^ (u >> _SHIFT2)
