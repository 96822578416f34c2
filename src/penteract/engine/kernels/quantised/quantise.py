"""FP8 quantisation of the operands of matrix products.

A scale is the largest absolute value of the elements that share it, divided by the largest FP8 value. `TORCH` quantises
in plain torch; `kernels/triton/quantised/quantise.py` does the same in GPU kernels, with identical bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from penteract.config.layout import Elementwise
from penteract.config.precision.fp8 import LARGEST, Format, Fp8
from penteract.engine.dtypes import FORMATS
from penteract.ops.declarations.quantised.fp8 import rows_at_once

TINY = 2.0**-96  # the least amax, so that no scale is zero
INFINITE = 0x7F800000  # as a pattern of bits


class Operand(NamedTuple):
    """A quantised operand: `data` [rows, k] times `scale`: [1]; [rows]; [k / block, rows]; or, for square blocks,
    [rows / block, k / block]."""

    data: torch.Tensor
    scale: torch.Tensor


class OperandView(NamedTuple):
    """A tensor to quantise, as one product reads it: a view [rows, k], summed over k. `square`: scaled by square
    blocks."""

    role: int  # index in the amax history of its layer
    rows: torch.Tensor
    format: Format
    square: bool = False


class Quantiser(NamedTuple):
    """An implementation of quantisation.

    put_largest    writes the amax of each scale's elements into zeros; Triton leaves those of blocks to `quantised`
    quantised      quantises an operand by these amax values, which may be lost
    quantise_into  quantises numbers [n] that share a scale [1] into [n]; plain torch needs the workspace
    """

    put_largest: Callable[[Fp8, OperandView, torch.Tensor], None]
    quantised: Callable[[Fp8, OperandView, torch.Tensor], Operand]
    quantise_into: Callable[[Format, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    elementwise: Elementwise


def scale_count(fp8: Fp8, view: OperandView) -> int:
    """The number of scales of a tensor: one, one for each row, or one for each block."""
    rows, k = view.rows.shape
    if fp8.kind == "rowwise":
        return rows
    if fp8.kind == "blockwise":
        return (rows // fp8.block if view.square else rows) * (k // fp8.block)
    return 1


def put_largest(fp8: Fp8, view: OperandView, out: torch.Tensor) -> None:
    """Write the amax of each scale's elements into `out`. A NaN is larger than any number."""
    norm = partial(torch.linalg.vector_norm, ord=torch.inf)
    if fp8.kind == "rowwise":
        out.copy_(norm(view.rows, dim=1))
    elif fp8.kind != "blockwise":
        out.copy_(norm(view.rows))
    elif view.square:
        squares = view.rows.unflatten(1, (-1, fp8.block)).unflatten(0, (-1, fp8.block))
        out.copy_(norm(squares, dim=(1, 3)).view(-1))
    else:
        out.view(-1, view.rows.shape[0]).copy_(norm(view.rows.unflatten(1, (-1, fp8.block)), dim=2).t())


def quantised(fp8: Fp8, view: OperandView, scale: torch.Tensor) -> Operand:
    """Divide by the scale, saturate, and round to nearest, ties to even. `scale`: the amax values, which become scales
    in place."""
    rows, k = view.rows.shape
    make_scales(fp8, view.format, scale)
    data = torch.empty(rows, k, dtype=FORMATS[view.format], device=scale.device)
    divide = _division(fp8, view, scale)
    some = rows_at_once(fp8, k, square=view.square)
    wide = torch.empty(min(some, rows), k, dtype=torch.float32, device=scale.device)
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        part = wide[: end - begin].copy_(view.rows[begin:end])
        divide(part, begin, end)
        round_into(data[begin:end], part, view.format)
    return Operand(data, as_shared(fp8, view, scale))


def as_shared(fp8: Fp8, view: OperandView, scale: torch.Tensor) -> torch.Tensor:
    """Scales in the shape that `Operand` has them."""
    rows, k = view.rows.shape
    return scale.view((-1, k // fp8.block) if view.square else (-1, rows)) if fp8.kind == "blockwise" else scale


def make_scales(fp8: Fp8, name: Format, largest: torch.Tensor) -> None:
    """Turn amax values in fp32 into scales, in place."""
    largest.clamp_(min=TINY).div_(torch.full((), LARGEST[name], device=largest.device))
    if fp8.powers_of(name):  # round up: carry any bit of the mantissa into the exponent, and drop the mantissa
        patterns = largest.view(torch.int32).clamp_(max=INFINITE)  # of NaN, too: else its power would be zero
        patterns.add_(0x7FFFFF).bitwise_and_(INFINITE)


def round_into(out: torch.Tensor, scaled: torch.Tensor, name: Format) -> None:
    """Saturate scaled numbers and round them into `out`; `scaled` is lost."""
    out.copy_(scaled.clamp_(-LARGEST[name], LARGEST[name]))


def _division(fp8: Fp8, view: OperandView, scale: torch.Tensor) -> Callable[[torch.Tensor, int, int], object]:
    """A function that divides rows [begin, end) by their scales, in place."""
    block, rows = fp8.block, view.rows.shape[0]
    if fp8.kind == "rowwise":
        return lambda part, begin, end: part.div_(scale[begin:end, None])
    if fp8.kind != "blockwise":
        return lambda part, begin, end: part.div_(scale)
    if view.square:
        squares = scale.view(rows // block, 1, -1, 1)
        return lambda part, begin, end: part.view(-1, block, squares.shape[2], block).div_(
            squares[begin // block : end // block]
        )
    blocks = scale.view(-1, rows).t()
    return lambda part, begin, end: part.view(end - begin, -1, block).div_(blocks[begin:end, :, None])


def quantise_into(
    name: Format, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor
) -> None:
    """values / scale, rounded to the format `name`, into `out` [n], as many elements at a time as `workspace` has."""
    for some, into in zip(values.split(len(workspace)), out.split(len(workspace)), strict=True):
        round_into(into, workspace[: len(some)].copy_(some).div_(scale), name)


TORCH = Quantiser(put_largest, quantised, quantise_into, "reference")


def quantiser(elementwise: Elementwise) -> Quantiser:
    """The quantiser for a layout's element-wise kernels."""
    if elementwise == "reference":
        return TORCH
    from penteract.engine.kernels.triton.quantised.quantise import TRITON  # imported only for layouts that use it

    return TRITON
