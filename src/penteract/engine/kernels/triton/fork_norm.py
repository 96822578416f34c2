"""The backward of RMSNorm of an x that a residual reads too, in one pass: the norm's gradient, plus the residual's, and
partial sums of the weight's gradient.

A program takes every PARTS-th row and keeps its partial sum in registers, so there are no atomics, and results do not
depend on how many processors a card has.
"""

# Triton's stubs know neither launches on a grid nor its language's operators:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penteract.engine.device.launches import bind
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors
from penteract.engine.kernels.triton.norm import after_clearing, put_sum
from penteract.engine.kernels.triton.quantised.fp8_tiles import put_larger
from penteract.engine.kernels.triton.quantised.quantise import patterns_of
from penteract.engine.kernels.triton.strides import power_of_two
from penteract.ops.declarations.fusions import PARTS
from penteract.ops.tape import Site


@dataclass(frozen=True, slots=True)
class NormForm:
    """How the kernel is compiled.

    elements  of a row that a thread has
    stages    rows that are on their way at a time, through shared memory, where they fit into STAGED bytes; 0: the next
              is read when one is done
    """

    elements: int = 16
    stages: int = 3


FORM = NormForm()  # the one that runs: benchmarks/norm_forms.py compares
STAGED = (
    72 * 2**10
)  # bytes of shared memory: three stages of x and two gradients, 4,096 wide in bf16, the widest measured


@Bindable
def fork_norm_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """x, its scale, the gradients of the norm and of x's other reader [rows, D] -> their sum, partial sums [PARTS, D].
    With a third out [1]: the largest absolute value of the sum."""
    x, scale, g, other = ins
    gradient, parts, *largest = outs
    width = x.shape[-1]
    launch = bind(
        _backward, (PARTS,), x, scale, weights[0], g, other, gradient, parts, *(largest or [None]), x.numel() // width,
        width, STRIDE=PARTS, BLOCK=power_of_two(width), STAGES=_stages(x), num_warps=_warps(width),
    )  # fmt: skip
    return after_clearing(largest, launch)


@Bindable
def fork_norm_weight(env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
    """Partial sums [PARTS, D] -> the weight's gradient [D], written or added."""
    return put_sum.bind(ins[0], into[0], add)


def _warps(width: int) -> int:
    """So that a thread has so many elements of a row at most."""
    return min(16, max(1, power_of_two(width) // (32 * FORM.elements)))


def _stages(x: torch.Tensor) -> int | None:
    """The form's stages where they fit."""
    staged = 3 * FORM.stages * power_of_two(x.shape[-1]) * x.element_size()
    return FORM.stages if 0 < staged <= STAGED else None


@triton.jit
def _backward(
    x, scale, weight, g, other, gradient, parts, largest, rows, width, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """largest: None, or fp32 [1], for the largest of the gradient and of what was found before."""
    at = tl.arange(0, BLOCK)
    here = at < width
    w = tl.load(weight + at, here, other=0.0).to(tl.float32)
    total, found = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    part = tl.program_id(0)
    for row in tl.range(part, rows, STRIDE, num_stages=STAGES):
        begin = tl.cast(row, tl.int64) * width
        s = tl.load(scale + row)
        normed = tl.load(x + begin + at, here, other=0.0).to(tl.float32) * s
        slope = tl.load(g + begin + at, here, other=0.0).to(tl.float32)
        branch = tl.load(other + begin + at, here, other=0.0).to(tl.float32)
        total += slope * normed
        slope = slope * w
        mean = tl.sum(slope * normed, axis=0) / width
        made = ((slope - normed * mean) * s + branch).to(gradient.dtype.element_ty)
        tl.store(gradient + begin + at, made, here)
        if largest is not None:
            found = tl.maximum(found, patterns_of(made.to(tl.float32)))
    tl.store(parts + part * width + at, total, here)
    if largest is not None:
        put_larger(largest, tl.max(tl.where(here, found, 0), axis=0))
