"""Bits of fp32 and bf16: conversions and a sum of a product that are the same on a GPU and in Triton's interpreter, and
a test for NaN.

A GPU has an instruction for each conversion. The interpreter rounds ties of bf16 otherwise and loses its smallest
numbers, so there they are made by bits.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

_EXPONENT = tl.constexpr(0x7F800000)  # of fp32: all ones in infinities and NaN
_BY_BITS = tl.constexpr(bool(triton.knobs.runtime.interpret))  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def wide(x):
    """As fp32."""
    if _BY_BITS and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 rounded to nearest in another dtype, ties to even."""
    if _BY_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = tl.where(x == x, bits + (0x7FFF + ((bits >> 16) & 1)), 0x7FC00000)
        return upper(nearest)
    else:
        return x.to(dtype)


@triton.jit
def upper(bits):
    """The upper half of fp32's bits, as bf16."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def joined(parameter, low):
    """fp32 master weights of their halves, bf16 and int16: `engine/state/split_master.py`."""
    upper = parameter.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """The bf16 and the int16 half of fp32 master weights."""
    bits = x.to(tl.int32, bitcast=True)
    upper = tl.where(x == x, (bits + 0x8000) >> 16, 0x7FC0)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True), (bits - (upper << 16)).to(tl.int16)


@triton.jit
def multiply_add(x, y, z):
    """x·y + z in fp32, rounded once. Some interpreters round fp32's product, too, but hold it in fp64."""
    if _BY_BITS:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def flag_nonfinite(flag, x, here):
    """Set flag [] to NaN if an element of x, in fp32, is not finite where `here` is true."""
    bad = here & ((x.to(tl.int32, bitcast=True) & _EXPONENT) == _EXPONENT)
    tl.store(flag + tl.zeros(x.shape, tl.int32), tl.full(x.shape, float("nan"), tl.float32), bad)
