"""Master weights of a tile, read and written by every kernel that updates them: whole in one buffer, or in two halves
of 16 bits, of which the upper one is the parameter."""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from penteract.engine.kernels.triton.bits import halves, joined, narrow, upper, wide


@triton.jit
def read_master(master, parameter, start, at, here, policy: tl.constexpr, SPLIT: tl.constexpr):
    """Elements `start + at` in fp32, where `here` is true. `policy`: of the L2 cache."""
    x = tl.load(master + start + at, here, other=0, eviction_policy=policy)
    if SPLIT:
        return joined(tl.load(parameter + start + at, here, other=0.0), x)
    else:
        return wide(x)


@triton.jit
def write_master(master, parameter, start, at, here, x, bits, policy: tl.constexpr, SPLIT: tl.constexpr):
    """Write what was updated, and the parameter if it is separate. -> what the parameter is now.

    `bits`: random ones, for parameters that are their own master weights; None: rounded to nearest.
    """
    if SPLIT:
        kept, low = halves(x)
        tl.store(master + start + at, low, here, eviction_policy=policy)
        tl.store(parameter + start + at, kept, here)
    else:
        kept = narrow(x, master.dtype.element_ty) if bits is None else upper(x.to(tl.int32, bitcast=True) + bits)
        tl.store(master + start + at, kept, here, eviction_policy=policy)
        if parameter is not None:
            kept = narrow(x, parameter.dtype.element_ty)
            tl.store(parameter + start + at, kept, here)
    return kept
