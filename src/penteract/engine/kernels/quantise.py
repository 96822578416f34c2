"""Codes of FP8 and their scales, of a tensor as one product wants it.

A scale is the largest absolute value of what shares it, over the largest code. `TORCH` makes both in plain torch;
`kernels/triton/quantise.py` has the same as kernels of a GPU, equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from penteract.config.layout import Elementwise
from penteract.config.precision.fp8 import LARGEST, Format, Fp8
from penteract.engine.dtypes import FORMATS
from penteract.ops.declarations.fp8 import rows_at_once

TINY = 2.0**-96  # what is smaller counts as this, so that no scale is zero


class Operand(NamedTuple):
    """codes [rows, k], each times its scale: [1]; [rows]; [k / block, rows]; of squares [rows / block, k / block]."""

    codes: torch.Tensor
    scale: torch.Tensor


class Look(NamedTuple):
    """A tensor as one product wants it: a view [rows, k]."""

    role: int
    rows: torch.Tensor
    format: Format
    square: bool = False


class Quantiser(NamedTuple):
    """How codes are made.

    put_largest  absolute values, of all that share a scale, into zeros; kernels leave those of blocks to `quantised`
    quantised    codes and scales of these; the largest values may be lost
    put_codes    of numbers [n] that share a scale [1], into [n], some at a time in the room that plain torch needs
    """

    put_largest: Callable[[Fp8, Look, torch.Tensor], None]
    quantised: Callable[[Fp8, Look, torch.Tensor], Operand]
    put_codes: Callable[[Format, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    elementwise: Elementwise


def scale_count(fp8: Fp8, look: Look) -> int:
    """Scales of a tensor: one, one a row, or one a block."""
    rows, k = look.rows.shape
    if fp8.kind == "rowwise":
        return rows
    if fp8.kind == "blockwise":
        return (rows // fp8.block if look.square else rows) * (k // fp8.block)
    return 1


def put_largest(fp8: Fp8, look: Look, out: torch.Tensor) -> None:
    """Absolute values, of all that share a scale. A NaN is the largest of all."""
    norm = partial(torch.linalg.vector_norm, ord=torch.inf)
    if fp8.kind == "rowwise":
        out.copy_(norm(look.rows, dim=1))
    elif fp8.kind != "blockwise":
        out.copy_(norm(look.rows))
    elif look.square:
        squares = look.rows.unflatten(1, (-1, fp8.block)).unflatten(0, (-1, fp8.block))
        out.copy_(norm(squares, dim=(1, 3)).view(-1))
    else:
        out.view(-1, look.rows.shape[0]).copy_(norm(look.rows.unflatten(1, (-1, fp8.block)), dim=2).t())


def quantised(fp8: Fp8, look: Look, scale: torch.Tensor) -> Operand:
    """Divide by the scale, saturate, round to the nearest code, ties to even. `scale`: the largest values, which become
    scales in place."""
    rows, k = look.rows.shape
    make_scales(fp8, look.format, scale)
    codes = torch.empty(rows, k, dtype=FORMATS[look.format], device=scale.device)
    each = _by_element(fp8, look, scale)
    some = rows_at_once(fp8, k, square=look.square)
    wide = torch.empty(min(some, rows), k, dtype=torch.float32, device=scale.device)
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        part = wide[: end - begin].copy_(look.rows[begin:end])
        each(part, begin, end)
        round_into(codes[begin:end], part, look.format)
    return Operand(codes, as_shared(fp8, look, scale))


def as_shared(fp8: Fp8, look: Look, scale: torch.Tensor) -> torch.Tensor:
    """Scales in the shape of what shares them."""
    rows, k = look.rows.shape
    return scale.view((-1, k // fp8.block) if look.square else (-1, rows)) if fp8.kind == "blockwise" else scale


def make_scales(fp8: Fp8, name: Format, largest: torch.Tensor) -> None:
    """Largest values in fp32 become scales, in place."""
    largest.clamp_(min=TINY).div_(torch.full((), LARGEST[name], device=largest.device))
    if fp8.powers:  # up to the next: carry any bit of the mantissa into the exponent, and drop the mantissa
        largest.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)


def round_into(codes: torch.Tensor, scaled: torch.Tensor, name: Format) -> None:
    """Scaled numbers, which are lost, as the nearest codes."""
    codes.copy_(scaled.clamp_(-LARGEST[name], LARGEST[name]))


def _by_element(fp8: Fp8, look: Look, scale: torch.Tensor) -> Callable[[torch.Tensor, int, int], object]:
    """Divides rows [begin, end) by their scales, in place."""
    block, rows = fp8.block, look.rows.shape[0]
    if fp8.kind == "rowwise":
        return lambda part, begin, end: part.div_(scale[begin:end, None])
    if fp8.kind != "blockwise":
        return lambda part, begin, end: part.div_(scale)
    if look.square:
        squares = scale.view(rows // block, 1, -1, 1)
        return lambda part, begin, end: part.view(-1, block, squares.shape[2], block).div_(
            squares[begin // block : end // block]
        )
    blocks = scale.view(-1, rows).t()
    return lambda part, begin, end: part.view(end - begin, -1, block).div_(blocks[begin:end, :, None])


def put_codes(name: Format, values: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, room: torch.Tensor) -> None:
    """values / scale, rounded to the format `name`, into `codes` [n], `room` elements at a time."""
    for some, into in zip(values.split(len(room)), codes.split(len(room)), strict=True):
        round_into(into, room[: len(some)].copy_(some).div_(scale), name)


TORCH = Quantiser(put_largest, quantised, put_codes, "reference")


def quantiser(elementwise: Elementwise) -> Quantiser:
    """That of a layout."""
    if elementwise == "reference":
        return TORCH
    from penteract.engine.kernels.triton.quantise import TRITON  # triton is imported where it is asked for

    return TRITON
